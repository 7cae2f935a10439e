"""Pays for uploads over pooled connections, with the official Python client: over httpx, or over requests.

    PRIVATE_KEY=0x... python uploads.py httpx|requests URL TIMES SIZE...

Posts each size to URL/length and to URL/blind, TIMES times, and prints {failures} as one JSON line.
"""

import asyncio
import json
import os
import sys

from eth_account import Account
from x402 import x402Client, x402ClientSync
from x402.http.clients import x402_requests, x402HttpxClient
from x402.mechanisms.evm.exact.register import register_exact_evm_client

ACCOUNT = Account.from_key(os.environ["PRIVATE_KEY"])
KIND, URL, TIMES, *SIZES = sys.argv[1:]
UPLOADS = [(int(size), path) for size in SIZES for _ in range(int(TIMES)) for path in ("length", "blind")]
failures = []


def check(size, path, response):
    if response.status_code != 200 or response.text != (str(size) if path == "length" else "well done"):
        failures.append(f"{size} bytes to {path}: {response.status_code} {response.text}")


async def over_httpx():
    client = register_exact_evm_client(x402Client(), ACCOUNT)
    async with x402HttpxClient(client, timeout=60) as http:
        for size, path in UPLOADS:
            try:
                check(size, path, await http.post(f"{URL}/{path}", content=b"x" * size))
            except Exception as error:
                failures.append(f"{size} bytes to {path}: {error!r}")


def over_requests():
    client = register_exact_evm_client(x402ClientSync(), ACCOUNT)
    with x402_requests(client) as session:
        for size, path in UPLOADS:
            try:
                check(size, path, session.post(f"{URL}/{path}", data=b"x" * size, timeout=60))
            except Exception as error:
                failures.append(f"{size} bytes to {path}: {error!r}")


if KIND == "httpx":
    asyncio.run(over_httpx())
else:
    over_requests()
print(json.dumps({"failures": failures}))
