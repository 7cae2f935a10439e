"""Presents payments to a facilitator again, as hostile-facilitator's other half does: after the answer, at once, and without having read it.

    PRIVATE_KEY=0x... python hostile_caller.py FACILITATOR_URL REQUIREMENTS

REQUIREMENTS are JSON. Each probe gets a payment of its own, signed by the official client. Prints one JSON line: for each probe
{probe, verdict, detail, transactions}.
"""

import json
import os
import sys

from eth_account import Account
from hostile_facilitator.hostile_client import ALL_PROBES, probe
from x402 import x402ClientSync
from x402.mechanisms.evm.exact.register import register_exact_evm_client
from x402.schemas import PaymentRequired, PaymentRequirements, ResourceInfo

url, requirements = sys.argv[1], json.loads(sys.argv[2])
client = register_exact_evm_client(x402ClientSync(), Account.from_key(os.environ["PRIVATE_KEY"]))
demand = PaymentRequired(
    accepts=[PaymentRequirements.model_validate(requirements)], resource=ResourceInfo(url="http://127.0.0.1/evaluate")
)


def payment():
    return client.create_payment_payload(demand).model_dump(by_alias=True, exclude_none=True, mode="json")


results = probe(f"{url}/settle", [payment() for _ in ALL_PROBES], requirements, settle_gap=0.5)
print(json.dumps([
    {"probe": result.probe, "verdict": result.verdict, "detail": result.detail, "transactions": sorted(result.settlements)}
    for result in results
]))
