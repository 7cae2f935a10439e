"""Pays at most a price (scheme upto), with the official Python client. The requests and the output are those of upto.mjs.

    PRIVATE_KEY=0x... python upto.py URL
"""

import asyncio
import base64
import json
import os
import sys

from eth_account import Account
from x402 import x402Client
from x402.http.clients import x402HttpxClient
from x402.mechanisms.evm.upto import UptoEvmClientScheme

ACCOUNT = Account.from_key(os.environ["PRIVATE_KEY"])


async def main():
    client = x402Client().register("eip155:*", UptoEvmClientScheme(ACCOUNT))
    for charge in ["1000", "300", "0"]:
        async with x402HttpxClient(client, timeout=30) as http:
            response = await http.post(f"{sys.argv[1]}?charge={charge}", content=charge.encode())
        header = response.headers.get("payment-response")
        payment = json.loads(base64.b64decode(header)) if header else None
        print(json.dumps({"charge": charge, "status": response.status_code, "body": response.text, "payment": payment}))


asyncio.run(main())
