#!/usr/bin/env bash
# Builds manifests/Dockerfile with buildah, and lets the image answer a request. Needs buildah and mmdebstrap, but no
# container registry: the base is a stand-in for rayproject/ray, made of Debian's packages and PyPI's.
#
# FLAGS: more options of `buildah build`, such as a volume with pip's configuration. The images stay in buildah's storage;
# `buildah rmi secateur-image secateur-base` removes them.
set -euo pipefail
cd "$(dirname "$0")/../.."
FLAGS=${FLAGS:-}
FOLDER=build/image
PORT=18017
for tool in buildah mmdebstrap; do
    command -v "$tool" > /dev/null || { echo "make image: $tool is missing; on Debian: apt-get install $tool" >&2; exit 1; }
done
ray=$(sed -nE 's/.*"(ray\[serve\]==[0-9.]+)".*/\1/p' pyproject.toml)
mkdir -p "$FOLDER"

# Like rayproject/ray: the pinned Ray in a Python that the user ray owns (uid 1000, group users), with bash and wget.
if [ ! -f "$FOLDER/base.tar" ]; then
    packages=python3,python3-venv,wget,ca-certificates
    mmdebstrap --variant=minbase --format=tar --include="$packages" bookworm "$FOLDER/base.tar.part"
    mv "$FOLDER/base.tar.part" "$FOLDER/base.tar"
fi
cat > "$FOLDER/base.Dockerfile" <<END
FROM scratch
ADD base.tar /
RUN useradd --uid 1000 --gid users --create-home --shell /bin/bash ray
USER 1000
RUN python3 -m venv /home/ray/python && /home/ray/python/bin/pip install --no-cache-dir wheel "$ray"
ENV PATH=/home/ray/python/bin:/usr/bin:/bin HOME=/home/ray
WORKDIR /home/ray
END

build() { # NAME DOCKERFILE CONTEXT [OPTION ...]
    # shellcheck disable=SC2086  # FLAGS are words
    buildah build --isolation chroot --network host $FLAGS --layers -t "$1" -f "$2" "${@:4}" "$3"
}

build secateur-base "$FOLDER/base.Dockerfile" "$FOLDER"
build secateur-image manifests/Dockerfile . --build-arg BASE=localhost/secateur-base \
    --ignorefile manifests/Dockerfile.dockerignore
buildah images --format '{{.Name}} {{.Size}}' | grep secateur-

container=$(buildah from localhost/secateur-image)
trap 'buildah rm "$container" > /dev/null' EXIT
# shellcheck disable=SC2016  # the image's shell expands it
buildah run --isolation chroot --network host --env PORT=$PORT "$container" -- bash -euc '
    [ "$(id -u)" = 1000 ]
    secateur serve --port "$PORT" &
    server=$!
    trap "kill $server; wait $server" EXIT
    is_up=
    for _ in $(seq 180); do
        wget -qO- --tries=1 --timeout=10 "http://127.0.0.1:$PORT/health" 2> /dev/null && is_up=1 && break
        kill -0 $server
        sleep 1
    done
    [ "$is_up" ] || { echo "the service did not answer within three minutes" >&2; exit 1; }
    wget -qO- --tries=1 --timeout=60 --header "Content-Type: application/json" \
        --post-data "{\"prompt\": \"def add(a, b):\", \"max_tokens\": 8, \"temperature\": 0}" \
        "http://127.0.0.1:$PORT/v1/completions"
    echo
    kill -0 $server  # it was this one that answered
'
echo "the image answers"
