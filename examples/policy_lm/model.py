"""A transformer of some 0.1 million parameters, its first stage, its policy gradient, and its checkpoint."""

import os
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tasks import END, PAD, PROGRAM, PROMPT, TOKENS, corpus

WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, PROMPT + PROGRAM
# How much the ratio of new and old probability may differ from 1, as in PPO.
CLIP = 0.2


def new_params(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 4 + 4 * LAYERS))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    layers = [
        {"qkv": matrix(WIDTH, 3 * WIDTH), "mix": matrix(WIDTH, WIDTH), "up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    return {"tokens": matrix(len(TOKENS), WIDTH), "places": 0.1 * matrix(LENGTH, WIDTH), "out": matrix(WIDTH, len(TOKENS)), "layers": layers}


def logits(params, tokens):
    """The logits of the token after each of `tokens`, of shape [sequences, length]."""
    length = tokens.shape[1]
    x = params["tokens"][tokens] + params["places"][:length]
    past = jnp.tril(jnp.ones((length, length), bool))
    for layer in params["layers"]:
        q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in jnp.split(norm(x) @ layer["qkv"], 3, axis=-1))
        weights = jnp.einsum("bihd,bjhd->bhij", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(past, weights, -1e9))
        x += jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(x.shape) @ layer["mix"]
        x += jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["out"]


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def logprobs(params, tokens):
    """The log-probability of each token but the first."""
    every = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    return jnp.take_along_axis(every, tokens[:, 1:, None], -1)[..., 0]


@jax.jit
def sample(params, prompts, key):
    """Draws a program for each prompt. Returns the tokens after the prompts and their log-probabilities."""
    tokens = jnp.concatenate([prompts, jnp.full((len(prompts), PROGRAM), PAD)], 1)

    def draw(tokens, step):
        place, key = step
        likely = jax.nn.log_softmax(logits(params, tokens)[:, place - 1])
        drawn = jax.random.categorical(key, likely)
        return tokens.at[:, place].set(drawn), jnp.take_along_axis(likely, drawn[:, None], 1)[:, 0]

    tokens, likely = jax.lax.scan(draw, tokens, (jnp.arange(PROMPT, LENGTH), jax.random.split(key, PROGRAM)))
    return tokens[:, PROMPT:], likely.T


def answers(params, prompts, key):
    """The programs for these prompts, each as its tokens up to END and their log-probabilities."""
    drawn, likely = (np.asarray(values) for values in sample(params, jnp.array(prompts), key))
    for tokens, row in zip(drawn.tolist(), likely.tolist()):
        length = tokens.index(END) + 1 if END in tokens else len(tokens)
        yield tokens[:length], row[:length]


def new_state(seed):
    params = new_params(seed)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "step": jnp.zeros((), jnp.int32), "updates": jnp.zeros((), jnp.int32)}


def adam(state, gradient, rate):
    updates = state["updates"] + 1
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / (size + 1e-9)), gradient)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], gradient)
    one, two = 1 - 0.9**updates, 1 - 0.99**updates
    params = jax.tree.map(lambda p, m, s: p - rate * (m / one) / (jnp.sqrt(s / two) + 1e-8), state["params"], mean, square)
    return {**state, "params": params, "mean": mean, "square": square, "updates": updates}


@jax.jit
def supervised(state, tokens):
    def loss(params):
        learned = jnp.cumsum(tokens[:, 1:] == END, 1) - (tokens[:, 1:] == END) == 0
        learned &= jnp.arange(1, tokens.shape[1]) >= PROMPT
        return -jnp.sum(logprobs(params, tokens) * learned) / jnp.sum(learned)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    return adam(state, gradient, 2e-3), value


def first_stage(seed, steps, fits=0.6):
    """Learns the grammar, and a little of what the words mean, from a corpus of which most programs are wrong."""
    state, rng = new_state(seed), random.Random(seed)
    for _ in range(steps):
        rows = [(prompt + program + [PAD] * LENGTH)[:LENGTH] for prompt, program in corpus(rng, 96, fits)]
        state, _ = supervised(state, jnp.array(rows))
    zeros = jax.tree.map(jnp.zeros_like, state["params"])
    return {**state, "mean": zeros, "square": zeros, "updates": jnp.zeros((), jnp.int32)}


@partial(jax.jit, static_argnames="rate")
def policy_gradient(state, tokens, learned, old, advantages, rate=6e-4):
    def loss(params):
        ratio = jnp.exp(logprobs(params, tokens) - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return -jnp.sum(gain * learned) / jnp.sum(learned)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    return adam(state, gradient, rate), value


def train(state, groups, passes=2):
    """Trains on a batch of Atropos: `tokens`, `masks`, `scores` and `inference_logprobs` of each group. A mask of -100 is of a token that
    is not learned."""
    rows, masks, old, advantages = [], [], [], []
    for group in groups:
        scores = np.array(group["scores"])
        gains = (scores - scores.mean()) / (scores.std() + 1e-3)
        rows += group["tokens"]
        masks += group["masks"]
        old += group["inference_logprobs"]
        advantages += gains.tolist()

    def padded(values, filler):
        return np.array([(list(row) + [filler] * LENGTH)[:LENGTH] for row in values])

    learned = padded(masks, -100)[:, 1:] != -100
    old = np.where(learned, padded(old, 0.0)[:, 1:], 0.0)
    gains = np.array(advantages)[:, None] * learned
    for _ in range(passes):
        state, _ = policy_gradient(state, padded(rows, PAD), learned, old, gains)
    return {**state, "step": state["step"] + 1}


def save(state, path):
    """Replaces the file atomically: after a crash it has this state or the previous one."""
    with open(f"{path}.new", "wb") as file:
        np.savez(file, *[np.asarray(leaf) for leaf in jax.tree.leaves(state)])
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def restore(path, seed, steps=250):
    """The state in the file, or one after so many steps of the first stage if there is no file."""
    if not os.path.exists(path):
        state = first_stage(seed, steps)
        save(state, path)
        return state
    with np.load(path) as file:
        leaves = [jnp.array(file[name]) for name in file.files]
    return jax.tree.unflatten(jax.tree.structure(new_state(seed)), leaves)
