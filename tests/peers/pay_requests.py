"""Buys one evaluation with the official Python client over requests. See buyer.py for arguments and output."""

from buyer import ACCOUNT, REQUEST, report
from x402 import x402ClientSync
from x402.http.clients import x402_requests
from x402.mechanisms.evm.exact.register import register_exact_evm_client

client = register_exact_evm_client(x402ClientSync(), ACCOUNT)
with x402_requests(client) as session:
    report(session.post(REQUEST["url"], data=REQUEST["content"], headers=REQUEST["headers"], timeout=30))
