# One purchase: x402 pay pays a service for which x402 charge charges, with the facilitator at FACILITATOR_URL.
#
#   X402=… UPSTREAM=http://… PAY_TO=0x… PAYER_PRIVATE_KEY=0x… FACILITATOR_URL=http://… bash one_purchase.sh
set -uo pipefail
ready=$(mktemp)
"$X402" charge --json --listen 127.0.0.1:0 --upstream "$UPSTREAM" --price '$0.001' --network base-sepolia --pay-to "$PAY_TO" \
  --facilitator-url "$FACILITATOR_URL" >"$ready" &
charge=$!
trap 'kill -9 $charge; rm "$ready"' EXIT
until [[ -s $ready ]]; do
  kill -0 $charge || exit
  sleep 0.05
done
address=$(sed 's/.*"listening":"\([^"]*\)".*/\1/' "$ready")
timeout 4 "$X402" pay "http://$address/evaluate" -d '17 * 23 = 391'
