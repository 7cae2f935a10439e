"""What the Python buyers share: the arguments and what they print.

    PRIVATE_KEY=0x... python pay_httpx.py URL

POSTs the evaluation in the environment's TASK to URL and prints {status, body, payment} as one JSON line, `payment` being
the decoded payment response, or null.
"""

import base64
import json
import os
import sys

from eth_account import Account

ACCOUNT = Account.from_key(os.environ["PRIVATE_KEY"])
REQUEST = {
    "url": sys.argv[1],
    "content": os.environ["TASK"].encode(),
    "headers": {"content-type": "application/json"},
}


def report(response):
    header = response.headers.get("payment-response") or response.headers.get("x-payment-response")
    payment = json.loads(base64.b64decode(header)) if header else None
    print(json.dumps({"status": response.status_code, "body": response.text, "payment": payment}))
