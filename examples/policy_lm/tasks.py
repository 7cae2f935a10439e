"""Programs of a filter, a map and a fold: their tokens, the first stage's corpus, and whether a program is right."""

import json
import random
import signal
import warnings
from functools import cache
from pathlib import Path

PARTS = json.loads((Path(__file__).parent / "tasks.json").read_text())
FILTERS, MAPS = sorted(PARTS["filters"]), sorted(PARTS["maps"])
FOLDS = PARTS["folds"]
WORDS = FILTERS + MAPS + [fold["name"] for fold in FOLDS]
PIECES = [
    "def f(xs):", "def f(secret, guess):", "\n    return ", "\n    t = 0", "\n    out = []", "\n    for x in xs:",
    "\n    for x, y in zip(guess, secret):", "\n        if ", ":\n            ", "\n            ", ":\n                return ",
    "if ", "out.append(", "out = out + [", "t += ", "t = ", "t |= ", "max(t, ", "y ^ ", "y != ", "sorted(", "[", "]", ")",
    " for x in xs if ", "[::-1]", "True", "False", "x", "y", "t", "out", " % ", " == ", " > ", " < ", " * ", " + ", " - ",
    " // ", "0", "1", "2", "3", "7", "9",
]
PAD, BEGIN, END = 0, 1, 2
TOKENS = ["", "", ""] + WORDS + PIECES
NUMBER = {token: number for number, token in enumerate(TOKENS) if token}
LONGEST_FIRST = sorted(PIECES, key=len, reverse=True)
# A prompt is three words and BEGIN.
PROMPT, PROGRAM = 4, 26
# How much slower or unsafe forms are told from the others, for the measurement.
WORSE = {3: "out = out + [", 4: "y != "}


def combinations(held_out):
    """The combinations that are asked for, or those that are held out. ../atropos_environment/tasks.rs has the same rule."""
    every = ((f, m, l) for f in range(len(FILTERS)) for m in range(len(MAPS)) for l in range(len(FOLDS)))
    return [parts for parts in every if (sum(parts) % 5 == 0) == held_out]


def fill(parts, form="good"):
    f, m, l = parts
    text = FOLDS[l].get(form, FOLDS[l]["good"])
    return text.replace("{filter}", PARTS["filters"][FILTERS[f]]).replace("{map}", PARTS["maps"][MAPS[m]])


def prompt_tokens(words):
    """The tokens of a prompt: the words that are known, and no others."""
    known = [NUMBER[word] for word in words.replace(",", " ").replace(".", " ").split() if word in WORDS]
    return (known + [PAD] * PROMPT)[: PROMPT - 1] + [BEGIN]


def prompt_of(parts):
    f, m, l = parts
    return prompt_tokens(f"{FILTERS[f]} {MAPS[m]} {FOLDS[l]['name']}")


@cache
def program_tokens(text):
    tokens = []
    while text:
        piece = next(piece for piece in LONGEST_FIRST if text.startswith(piece))
        tokens.append(NUMBER[piece])
        text = text[len(piece):]
    return tokens + [END]


def program_text(tokens):
    return "".join(TOKENS[token] for token in tokens if token not in (PAD, BEGIN, END) and TOKENS[token] not in WORDS)


def corpus(rng, count, fits):
    """Prompts with programs of the grammar. Each part of a program fits the prompt with the probability `fits` and is drawn at random
    otherwise. Where there is a slow or an unsafe form, it is as frequent as the other. What is held out does not occur."""
    asked = combinations(held_out=False)
    known = set(asked)
    for _ in range(count):
        parts = rng.choice(asked)
        while True:
            drawn = tuple(
                part if rng.random() < fits else rng.randrange(many)
                for part, many in zip(parts, (len(FILTERS), len(MAPS), len(FOLDS)))
            )
            if drawn in known:
                break
        yield prompt_of(parts), program_tokens(fill(drawn, rng.choice(["good", "bad"])))


def is_right(program, parts):
    """Runs a program on random inputs, and compares it with the right one. This is the truth, which neither market nor trainer sees."""
    level = FOLDS[parts[2]]["level"]
    if WORSE.get(level, "\0") in program:
        return False
    try:
        ours, right = load(program), load(fill(parts))
        rng = random.Random(7)
        for size in range(12):
            numbers = [rng.randrange(20) for _ in range(size)]
            inputs = [numbers]
            if level == 4:
                expression = PARTS["maps"][MAPS[parts[1]]]
                secret = [eval(expression, {"__builtins__": {}}, {"x": x}) for x in numbers]
                if secret and rng.random() < 0.5:
                    secret[rng.randrange(size)] += 1
                inputs = [secret, numbers]
            if limited(ours, inputs) != right(*inputs):
                return False
        return True
    except Exception:
        return False


def load(program):
    # Only tokens of PIECES can be in it: no names but these, and no attributes but `append`.
    names = {"__builtins__": {}, "sorted": sorted, "max": max, "zip": zip}
    warnings.simplefilter("ignore", SyntaxWarning)
    exec(program, names)
    return names["f"]


def limited(function, inputs):
    def stop(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        return function(*(list(value) for value in inputs))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
