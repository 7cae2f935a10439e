"""A policy that is a language model: serves it at an OpenAI-compatible endpoint, and trains it on the batches of an Atropos server.

GET /v1/models, POST /v1/completions and POST /v1/chat/completions. Answers hold `prompt_token_ids` and `token_ids`, as vLLM's do with
`return_token_ids`, and the log-probability of each token. The temperature is 1. With --checkpoint, a run that was killed goes on: a batch
that was taken and not yet trained on is lost.
"""

import argparse
import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax

from model import LENGTH, answers, restore, save, train
from tasks import END, TOKENS, program_text, prompt_tokens

# The longest request, in bytes, and the most answers to it.
MAX_BODY, MAX_ANSWERS = 1 << 16, 64


class Policy:
    """The state that is served. Whoever answers reads it once, so that all answers to a request are of the same weights."""

    def __init__(self, state, seed):
        self.state, self.key, self.lock = state, jax.random.key(seed), threading.Lock()

    def answer(self, prompt, count):
        with self.lock:
            self.key, key = jax.random.split(self.key)
            params = self.state["params"]
        return list(answers(params, [prompt] * count, key))


class Endpoint(BaseHTTPRequestHandler):
    policy = None

    def do_GET(self):
        if self.path == "/v1/models":
            return self.say(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
        self.refuse(404, "GET /v1/models is served")

    def do_POST(self):
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            return self.refuse(404, "POST /v1/completions and /v1/chat/completions are served")
        try:
            length = int(self.headers["content-length"])
            if not 0 <= length <= MAX_BODY:
                return self.refuse(413, f"the body is longer than {MAX_BODY} bytes")
            asked = json.loads(self.rfile.read(length))
            text = asked["messages"][-1]["content"] if chat else asked["prompt"]
            count, temperature = int(asked.get("n") or 1), float(asked.get("temperature", 1))
            prompt = prompt_tokens(text)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return self.refuse(400, "the body is no completion request of one text")
        if not 1 <= count <= MAX_ANSWERS or temperature != 1:
            return self.refuse(400, f"n is from 1 to {MAX_ANSWERS}, and temperature is 1")
        drawn = self.policy.answer(prompt, count)
        self.say(200, {
            "id": "policy", "object": "chat.completion" if chat else "text_completion", "created": int(time.time()), "model": "policy",
            "prompt_token_ids": prompt,
            "choices": [choice(chat, number, *one) for number, one in enumerate(drawn)],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": sum(len(tokens) for tokens, _ in drawn)},
        })

    def refuse(self, status, message):
        self.say(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def say(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def choice(chat, number, tokens, logprobs):
    text = program_text(tokens)
    about = {"index": number, "token_ids": tokens, "finish_reason": "stop" if tokens[-1] == END else "length"}
    if chat:
        each = [{"token": TOKENS[token], "logprob": logprob} for token, logprob in zip(tokens, logprobs)]
        return {**about, "message": {"role": "assistant", "content": text}, "logprobs": {"content": each}}
    return {**about, "text": text, "logprobs": {"tokens": [TOKENS[token] for token in tokens], "token_logprobs": logprobs}}


def ask(url, body=None):
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def register(server, batch_size, step, steps):
    ask(f"{server}/register", {
        "wandb_group": "policy_lm", "wandb_project": "policy_lm", "batch_size": batch_size, "max_token_len": 2 * LENGTH,
        "checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": step, "num_steps": steps,
    })


def learn(policy, flags):
    """Takes batches and trains on them. A server that is being restarted is waited for, and registered with again."""
    registered = False
    while (step := int(policy.state["step"])) < flags.steps:
        try:
            if not registered:
                register(flags.atropos_url, flags.batch_size, step, flags.steps)
                registered = True
            answer = ask(f"{flags.atropos_url}/batch")
            if answer.get("status") == "error":
                registered = False
                continue
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            # A server that has restarted has forgotten this trainer and says so when it is asked.
            time.sleep(1)
            continue
        groups = [group for group in answer["batch"] or [] if is_trainable(group)]
        if not answer["batch"]:
            time.sleep(0.2)
            continue
        if groups:
            policy.state = train(policy.state, groups)
            save(policy.state, flags.checkpoint)
        scores = [score for group in groups for score in group["scores"]]
        print(f"step {int(policy.state['step'])}: mean score {sum(scores) / max(len(scores), 1):.2f}", file=sys.stderr, flush=True)


def is_trainable(group):
    """Whether the group's tokens are this policy's: bytes of another's answers are not."""
    rows = group["tokens"]
    return group["inference_logprobs"] and all(0 < len(row) <= LENGTH and 0 <= min(row) and max(row) < len(TOKENS) for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", type=int, default=9001, help="the port of the endpoint, on 127.0.0.1; 0 chooses one")
    parser.add_argument("--atropos-url", default="http://127.0.0.1:8000", help="the Atropos API server")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a batch; a multiple of the environment's --group-size")
    parser.add_argument("--steps", type=int, default=1_000_000, help="how many batches to train on, over all runs")
    parser.add_argument("--checkpoint", default="policy.npz", help="the file of the weights; without it the first stage runs")
    parser.add_argument("--first-stage", type=int, default=250, metavar="STEPS", help="the length of the first stage")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    state = restore(flags.checkpoint, flags.seed, flags.first_stage)
    # After a kill, other random numbers than before it.
    policy = Endpoint.policy = Policy(state, flags.seed * 1_000_003 + int(state["step"]))
    server = ThreadingHTTPServer(("127.0.0.1", flags.listen), Endpoint)
    print(json.dumps({"listening": f"127.0.0.1:{server.server_port}"}), flush=True)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        # Here, so that the process ends if it can no longer learn.
        learn(policy, flags)
        serving.join()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
