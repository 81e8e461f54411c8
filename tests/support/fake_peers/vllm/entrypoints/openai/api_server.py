"""vLLM's server: starts late, beside a process of its own, which ignores SIGTERM."""

import argparse
import subprocess
import sys
import time

import fake_server  # type: ignore[import-not-found]  # beside this file on the path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
args, _ = parser.parse_known_args()
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.DEVNULL)
time.sleep(0.5)
fake_server.serve(args.port).serve_forever()
