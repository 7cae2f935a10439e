"""The official FastAPI middleware, with the official Python facilitator in the same process or another one over HTTP.

    FACILITATOR_URL=http://... PAY_TO=0x... FLOW=authorization python fastapi_server.py
    PRIVATE_KEY=0x... RPC_URL=http://... PAY_TO=0x... FLOW=authorization python fastapi_server.py

Sells POST /evaluate for $0.001 on Base Sepolia; GET /stats says how often its handler ran. When ready it prints
{"listening"} as one JSON line. The key settles, and needs ether.
"""

import asyncio
import os

from fastapi import FastAPI
from seller import NETWORK, facilitator_here, serve
from x402 import x402ResourceServer
from x402.http import FacilitatorConfig, HTTPFacilitatorClient
from x402.http.middleware.fastapi import payment_middleware
from x402.mechanisms.evm.exact.register import register_exact_evm_server


def facilitator():
    if url := os.environ.get("FACILITATOR_URL"):
        return HTTPFacilitatorClient(FacilitatorConfig(url=url))
    return facilitator_here(os.environ)


accepts = {"scheme": "exact", "price": "$0.001", "network": NETWORK, "payTo": os.environ["PAY_TO"]}
if (flow := os.environ.get("FLOW", "authorization")) != "authorization":
    accepts["extra"] = {"paymentFlow": flow}

app = FastAPI()
server = register_exact_evm_server(x402ResourceServer(facilitator()), NETWORK)
app.middleware("http")(payment_middleware({"POST /evaluate": {"accepts": accepts}}, server))
handled = 0


@app.get("/stats")
async def stats():
    return {"handled": handled}


@app.post("/evaluate")
async def evaluate():
    global handled
    handled += 1
    await asyncio.sleep(0.05)
    return {"score": 1}


serve(app)
