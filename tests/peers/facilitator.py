"""The official Python facilitator behind a small HTTP server.

    PRIVATE_KEY=0x... RPC_URL=http://... python facilitator.py

When ready it prints {"listening"} as one JSON line. The key settles, and needs ether.
"""

import os

from fastapi import FastAPI, Request
from seller import facilitator_here, serve
from x402.schemas import PaymentPayload, PaymentRequirements

app = FastAPI()
facilitator = facilitator_here(os.environ)


async def asked(request):
    body = await request.json()
    payload = PaymentPayload.model_validate(body["paymentPayload"])
    return payload, PaymentRequirements.model_validate(body["paymentRequirements"])


def said(answer):
    return answer.model_dump(by_alias=True, exclude_none=True)


@app.post("/verify")
async def verify(request: Request):
    return said(await facilitator.verify(*await asked(request)))


@app.post("/settle")
async def settle(request: Request):
    return said(await facilitator.settle(*await asked(request)))


@app.get("/supported")
async def supported():
    return said(facilitator.get_supported())


serve(app)
