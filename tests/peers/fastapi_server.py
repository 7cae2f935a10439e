"""The official FastAPI middleware, with the official Python facilitator in the same process or another one over HTTP.

    FACILITATOR_URL=http://... PAY_TO=0x... FLOW=authorization python fastapi_server.py
    PRIVATE_KEY=0x... RPC_URL=http://... PAY_TO=0x... OFFERS=batch-settlement,exact python fastapi_server.py

Sells /evaluate for $0.001 on Base Sepolia. The key settles, and needs ether; it is the channels' receiver authorizer, too. Queries and
other paths are those of channels_server.mjs. When ready it prints {"listening"} as one JSON line.
"""

import asyncio
import os

from eth_account import Account
from fastapi import FastAPI, Request, Response
from seller import NETWORK, facilitator_here, serve
from x402 import x402ResourceServer
from x402.http import FacilitatorConfig, HTTPFacilitatorClient
from x402.http.middleware.fastapi import payment_middleware, set_settlement_overrides
from x402.mechanisms.evm.batch_settlement.authorizer_signer import LocalAuthorizerSigner
from x402.mechanisms.evm.batch_settlement.server import (
    BatchSettlementEvmScheme,
    BatchSettlementEvmSchemeServerConfig,
    InMemoryChannelStorage,
)
from x402.mechanisms.evm.exact.register import register_exact_evm_server
from x402.mechanisms.evm.upto import UptoEvmServerScheme

PAY_TO = os.environ["PAY_TO"]
OFFERS = os.environ.get("OFFERS", "exact").split(",")


class Books:
    """Books that can be lost."""

    def __init__(self):
        self.kept = InMemoryChannelStorage()

    def __getattr__(self, name):
        return getattr(self.kept, name)


def facilitator():
    if url := os.environ.get("FACILITATOR_URL"):
        return HTTPFacilitatorClient(FacilitatorConfig(url=url))
    return facilitator_here(os.environ)


books = Books()
client = facilitator()
server = register_exact_evm_server(x402ResourceServer(client), NETWORK)
if "batch-settlement" in OFFERS:
    authorizer = LocalAuthorizerSigner(Account.from_key(os.environ["PRIVATE_KEY"]))
    config = BatchSettlementEvmSchemeServerConfig(storage=books, receiver_authorizer_signer=authorizer)
    scheme = BatchSettlementEvmScheme(PAY_TO, config)
    server.register(NETWORK, scheme)
if "upto" in OFFERS:
    server.register(NETWORK, UptoEvmServerScheme())
accepts = [{"scheme": offer, "price": "$0.001", "network": NETWORK, "payTo": PAY_TO} for offer in OFFERS]
if (flow := os.environ.get("FLOW", "authorization")) != "authorization":
    for offer in accepts:
        offer["extra"] = {"paymentFlow": flow}

app = FastAPI()
# Any method: the official clients ask with GET what a refund needs.
app.middleware("http")(payment_middleware({"/evaluate": {"accepts": accepts}}, server))
handled = 0


@app.get("/stats")
async def stats():
    return {"handled": handled}


@app.post("/forget")
async def forget():
    books.kept = InMemoryChannelStorage()
    return {}


@app.post("/claim")
async def claim():
    await scheme.create_channel_manager(client, NETWORK).claim_and_settle()
    return {}


@app.post("/evaluate")
async def evaluate(request: Request, response: Response):
    global handled
    handled += 1
    query = request.query_params
    await asyncio.sleep(float(query.get("delay", "50")) / 1000)
    if "fail" in query:
        response.status_code = int(query["fail"])
        return {"error": "the handler failed"}
    if "charge" in query:
        set_settlement_overrides(response, {"amount": query["charge"]})
    return {"score": 1}


serve(app)
