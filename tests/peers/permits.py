"""Pays a price by permit of Permit2 (scheme exact), with the official Python client. Of the offers, it takes the one by permit.

See buyer.py for arguments and output.
"""

import asyncio

from buyer import ACCOUNT, REQUEST, report
from x402 import x402Client
from x402.http.clients import x402HttpxClient
from x402.mechanisms.evm.exact.register import register_exact_evm_client


def by_permit(_version, offers):
    return next(offer for offer in offers if (offer.extra or {}).get("assetTransferMethod") == "permit2")


async def main():
    client = register_exact_evm_client(x402Client(by_permit), ACCOUNT)
    async with x402HttpxClient(client, timeout=30) as http:
        report(await http.post(**REQUEST))


asyncio.run(main())
