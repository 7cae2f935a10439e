"""Pays one purchase after the other with the official Python client, which sends a request again until it is answered.

    PRIVATE_KEY=0x... python stubborn.py httpx|requests URL COUNT

Prints one JSON line: for each purchase {score, status, body, payment}, `score` being what the right answer says.
"""

import asyncio
import base64
import json
import os
import sys
import time

import httpx
import requests
from eth_account import Account
from requests.adapters import HTTPAdapter
from x402 import x402Client, x402ClientSync
from x402.http.clients.httpx import x402_httpx_transport
from x402.http.clients.requests import x402HTTPAdapter
from x402.mechanisms.evm.exact.register import register_exact_evm_client

ACCOUNT = Account.from_key(os.environ["PRIVATE_KEY"])
KIND, URL, COUNT = sys.argv[1:]
WORK = [(number % 2, b"17 * 23 = 391" if number % 2 else b"17 * 23 = 390") for number in range(int(COUNT))]
PAUSE = 0.05
purchases = []


def comes_later(status):
    """What a seller answers that is away, or busy with the same payment."""
    return status in (409, 429) or status >= 500


def keep(score, status, headers, body):
    header = headers.get("payment-response")
    payment = json.loads(base64.b64decode(header)) if header else None
    purchases.append({"score": score, "status": status, "body": body, "payment": payment})


class UntilAnswered(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        while True:
            try:
                response = await super().handle_async_request(request)
                await response.aread()
                if not comes_later(response.status_code):
                    return response
            except httpx.TransportError:
                pass  # The seller was killed before its answer, or in the middle of it.
            await asyncio.sleep(PAUSE)


async def over_httpx():
    client = register_exact_evm_client(x402Client(), ACCOUNT)
    async with httpx.AsyncClient(transport=x402_httpx_transport(client, UntilAnswered()), timeout=30) as http:
        for score, work in WORK:
            response = await http.post(URL, content=work)
            keep(score, response.status_code, response.headers, response.text)


class SendsUntilAnswered(HTTPAdapter):
    def send(self, request, **kwargs):
        while True:
            try:
                response = super().send(request, **kwargs)
                if not comes_later(response.status_code):
                    return response
            except requests.RequestException:
                pass
            time.sleep(PAUSE)


class PaysUntilAnswered(x402HTTPAdapter, SendsUntilAnswered):
    """The official adapter, which sends through the one above."""


def over_requests():
    session = requests.Session()
    session.mount("http://", PaysUntilAnswered(register_exact_evm_client(x402ClientSync(), ACCOUNT)))
    for score, work in WORK:
        response = session.post(URL, data=work, timeout=30)
        keep(score, response.status_code, response.headers, response.text)


if KIND == "httpx":
    asyncio.run(over_httpx())
else:
    over_requests()
print(json.dumps(purchases))
