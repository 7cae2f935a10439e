"""What the Python sellers and facilitators share: the facilitator of the package, and how they say that they are ready."""

import json
import socket

import uvicorn
from x402 import x402Facilitator
from x402.mechanisms.evm import FacilitatorWeb3Signer
from x402.mechanisms.evm.batch_settlement.facilitator import BatchSettlementEvmFacilitator
from x402.mechanisms.evm.exact.register import register_exact_evm_facilitator
from x402.mechanisms.evm.upto import UptoEvmFacilitatorScheme

NETWORK = "eip155:84532"


def facilitator_here(environment):
    signer = FacilitatorWeb3Signer(environment["PRIVATE_KEY"], environment["RPC_URL"])
    facilitator = register_exact_evm_facilitator(x402Facilitator(), signer, NETWORK)
    facilitator.register([NETWORK], UptoEvmFacilitatorScheme(signer))
    return facilitator.register([NETWORK], BatchSettlementEvmFacilitator(signer))


def serve(app):
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"listening": "127.0.0.1:%d" % listener.getsockname()[1]}), flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
