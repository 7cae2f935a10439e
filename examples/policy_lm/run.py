"""Trains the policy for some minutes on scores that it buys: a devnet with evaluators, the Atropos API server, the environment and the policy.

Prints the pass rates before and after, by the truth, and what was paid. Works in --directory and removes nothing there: the second run
goes on with the weights of the first.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent


def measure(checkpoint):
    output = subprocess.run([sys.executable, HERE / "measure.py", "--checkpoint", checkpoint], check=True, stdout=subprocess.PIPE)
    return json.loads(output.stdout)


def wait_for(url, process):
    for _ in range(600):
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            if process.poll() is not None:
                sys.exit(f"{process.args[0]} ended before {url} answered")
            time.sleep(0.2)
    sys.exit(f"{url} does not answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-api", required=True, help="the program run-api of atroposlib")
    parser.add_argument("--environment", required=True, help="the program atropos_environment")
    parser.add_argument("--code-worker", required=True, help="the program x402-code-worker")
    parser.add_argument("--directory", type=Path, default=Path("target/policy_lm"))
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--budget", default="$2.00")
    parser.add_argument("--port", type=int, default=8000, help="of the API server; the policy has the next one")
    parser.add_argument("--kill-policy-after", type=float, metavar="SECONDS", help="kill the policy once, and start it again")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    flags.directory.mkdir(parents=True, exist_ok=True)
    checkpoint = flags.directory / "policy.npz"
    server, policy_url = f"http://127.0.0.1:{flags.port}", f"http://127.0.0.1:{flags.port + 1}"
    print("the first stage, if there is no checkpoint", file=sys.stderr)
    before = measure(checkpoint)
    print("before:", json.dumps(before), flush=True)
    running = []
    try:
        with open(flags.directory / "run-api.log", "w") as log:
            running.append(subprocess.Popen([flags.run_api, "--host", "127.0.0.1", "--port", str(flags.port)], stdout=log, stderr=log))
        wait_for(server, running[0])
        policy = [
            sys.executable, HERE / "policy.py", "--listen", str(flags.port + 1), "--atropos-url", server, "--checkpoint", checkpoint,
            "--seed", str(flags.seed),
        ]
        running.append(subprocess.Popen(policy, stdout=subprocess.DEVNULL))
        wait_for(f"{policy_url}/v1/models", running[1])
        begun = time.time()
        environment = subprocess.Popen([
            flags.environment, "--atropos-url", server, "--tasks", "code", "--code-worker", flags.code_worker, "--policy-url",
            f"{policy_url}/v1", "--groups", str(flags.groups), "--budget", flags.budget, "--max-queue", "4", "--seed", str(flags.seed),
            "--out", flags.directory,
        ], stdout=subprocess.PIPE)
        running.append(environment)
        try:
            output, _ = environment.communicate(timeout=flags.kill_policy_after)
        except subprocess.TimeoutExpired:
            running[1].kill()
            running[1].wait()
            print("the policy was killed, and is started again", file=sys.stderr)
            running[1] = subprocess.Popen(policy, stdout=subprocess.DEVNULL)
            output, _ = environment.communicate()
        summary = json.loads(output or "{}")
        # What is in the queue is trained on, but for half a batch.
        time.sleep(5)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
    after = measure(checkpoint)
    for name in ["groups", "spent", "on_chain", "evaluators"]:
        print(f"{name}:", json.dumps(summary.get(name)))
    print("before:", json.dumps(before))
    print("after: ", json.dumps(after))
    print(f"{after['step'] - before['step']} steps in {time.time() - begun:.0f} s", flush=True)
    sys.exit(environment.returncode)


if __name__ == "__main__":
    main()
