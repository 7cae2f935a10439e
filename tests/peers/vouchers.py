"""Pays with vouchers (scheme batch-settlement), with the official Python client. The steps and the output are those of vouchers.mjs.

    PRIVATE_KEY=0x... RPC_URL=http://... python vouchers.py URL
"""

import asyncio
import base64
import json
import os
import sys

from eth_account import Account
from x402 import x402Client
from x402.http.clients import x402HttpxClient
from x402.mechanisms.evm.batch_settlement.client import BatchSettlementEvmScheme
from x402.mechanisms.evm.signers import EthAccountSignerWithRPC

URL = sys.argv[1]
SIGNER = EthAccountSignerWithRPC(Account.from_key(os.environ["PRIVATE_KEY"]), os.environ["RPC_URL"])


def new_client():
    scheme = BatchSettlementEvmScheme(SIGNER)
    return scheme, x402Client().register("eip155:*", scheme)


def report(step, status, body, payment):
    print(json.dumps({"step": step, "status": status, "body": body, "payment": payment}), flush=True)


async def buy(client, step, task, query=""):
    async with x402HttpxClient(client, timeout=30) as http:
        response = await http.post(URL + query, content=task.encode())
    header = response.headers.get("payment-response")
    report(step, response.status_code, response.text, json.loads(base64.b64decode(header)) if header else None)


async def main():
    _, buyer = new_client()
    await buy(buyer, "deposit", "one")
    await buy(buyer, "voucher", "two")
    await buy(buyer, "cheaper", "cheap", "?charge=300")
    await buy(buyer, "after", "three")
    together = buy(buyer, "together", "four"), buy(buyer, "together", "five")
    if os.environ.get("ALONE"):
        for request in together:
            await request
    else:
        await asyncio.gather(*together)
    scheme, forgetful = new_client()
    await buy(forgetful, "recovered", "six")
    refund = await asyncio.to_thread(scheme.refund, URL)
    report("refund", 200, "", json.loads(refund.model_dump_json(by_alias=True)))
    await buy(forgetful, "again", "seven")


asyncio.run(main())
