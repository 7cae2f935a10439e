"""Buys one evaluation with the official Python client over httpx. See buyer.py for arguments and output."""

import asyncio

from buyer import ACCOUNT, REQUEST, report
from x402 import x402Client
from x402.http.clients import x402HttpxClient
from x402.mechanisms.evm.exact.register import register_exact_evm_client


async def main():
    client = register_exact_evm_client(x402Client(), ACCOUNT)
    async with x402HttpxClient(client, timeout=30) as http:
        report(await http.post(**REQUEST))


asyncio.run(main())
