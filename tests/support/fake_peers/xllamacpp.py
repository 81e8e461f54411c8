"""The part of xllamacpp that `bench/peer_process.py` uses."""

import threading
from types import SimpleNamespace

import fake_server  # type: ignore[import-not-found]  # beside this file on the path

print("libraries print to stdout", flush=True)


def CommonParams():
    own = ("model", "cpuparams", "cpuparams_batch")
    return SimpleNamespace(**{name: SimpleNamespace() for name in own})


class Server:
    def __init__(self, params):
        if not params.model.path.endswith(".gguf"):
            raise ValueError(f"no GGUF file: {params.model.path}")
        http = fake_server.serve()
        self.listening_address = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
