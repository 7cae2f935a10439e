//! Messages and digests of the scheme `upto`: those of its documents' vectors, and those that the official packages exchanged.

use alloy_primitives::{Address, B256, U256, address, b256, keccak256};
use alloy_signer_local::PrivateKeySigner;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tower_x402::{
    Network,
    eip3009::{Authorization, AuthorizationSigner as _},
    payment::{Authenticity, PaymentKey, Terms, Window, precheck},
    permit2::{PERMIT2, Permit},
    protocol::{
        ExactOffer, ExactPayload, FacilitatorRequest, PaymentPayload, PaymentRequired, SettlementResponse,
        SupportedResponse, VerifyResponse,
    },
    upto::{self, PROXY},
};

const PAYER: Address = address!("7E5F4552091A69125d5DfCb7b8C2659029395Bdf");
const FACILITATOR: Address = address!("2B5AD5c4795c026514f8317c7a215E218DcCD6cF");
const PAYEE: Address = address!("6813Eb9362372EEF6200f3b1dbC3f819671cBA69");
const NONCE: B256 = b256!("1111111111111111111111111111111111111111111111111111111111111107");

struct Vector {
    network: Network,
    separator: B256,
    digest: B256,
    signature: &'static str,
}

const VECTORS: [Vector; 2] = [
    Vector {
        network: Network::BASE_SEPOLIA,
        separator: b256!("010f27a92fb9a32622f44f001dc4d15706a85b33499cfc2ce9033113ab26592c"),
        digest: b256!("285a64a33f11bf68dd2ea76422b5b7794848ca9fe2f3c2ca056349829775aa2e"),
        signature: "0x08830c51f7853e7cedc823e8f3c70f0902ac7ab987e5d35724e2019a0e322af84cbbecfd63da362ed65d6cbf6de2fa093c873e9b7192cc443b9f4c13f6685e731c",
    },
    Vector {
        network: Network::BASE,
        separator: b256!("3b6f35e4fce979ef8eac3bcdc8c3fc38fe7911bb0c69c8fe72bf1fd1a17e6f07"),
        digest: b256!("159bad67c78ce4440e4c46cf3240fe403b342e35955f5ea30caf2890d1a46658"),
        signature: "0xadf3b945ae24698fdb9bf96d4d402056e99268f39d93ec0206c036893af758444beb442b972b455590a4bdca05197e4849dc79bf454bcd1d0527210b8b3f47e41c",
    },
];

fn maximum() -> Authorization {
    Authorization {
        from: PAYER,
        to: PAYEE,
        value: U256::from(10_000),
        valid_after: U256::ZERO,
        valid_before: U256::from(1_900_000_000_u64),
        nonce: NONCE,
    }
}

#[tokio::test]
async fn digests_and_signatures_are_those_of_the_vectors() {
    let key = PrivateKeySigner::from_bytes(&B256::with_last_byte(1)).unwrap();
    for vector in VECTORS {
        let usdc = vector.network.usdc().unwrap();
        let (permit, domain) = (upto::permit(usdc.address, FACILITATOR), Permit::domain(vector.network));
        assert_eq!(domain.separator(), vector.separator);
        assert_eq!(permit.signing_hash(&maximum(), &domain), vector.digest);
        let signature = key.sign_digest(vector.digest).await.unwrap();
        assert_eq!(serde_json::to_value(&signature).unwrap(), vector.signature);
        // As terms of an offer, it is the payer's, and its nonce is Permit2's whatever the token.
        let offer = ExactOffer::new(usdc, U256::from(10_000), PAYEE, 300).up_to(FACILITATOR);
        let payload = ExactPayload { signature, authorization: maximum(), permit: Some(permit) };
        let payment = precheck(Terms::new(offer).into(), payload, Window::default(), 1_899_999_800).unwrap();
        assert_eq!(payment.authenticity(), Authenticity::Proven);
        assert_eq!(payment.signing_hash(), vector.digest);
        let key = PaymentKey { network: vector.network, asset: PERMIT2, payer: PAYER, nonce: NONCE };
        assert_eq!(payment.key(), key);
        assert_eq!((payment.amount(), payment.clone().charging(U256::ZERO).amount()), (maximum().value, U256::ZERO));
    }
}

#[test]
fn permit_is_valid_up_to_its_deadline_and_for_one_token() {
    let usdc = Network::BASE.usdc().unwrap();
    let terms = std::sync::Arc::new(Terms::new(
        ExactOffer::new(usdc.clone(), U256::from(10_000), PAYEE, 300).up_to(FACILITATOR),
    ));
    let signature: ExactPayload = serde_json::from_value(recorded("payment")["payload"].clone()).unwrap();
    let check = |permit: Permit, now| {
        let payload =
            ExactPayload { signature: signature.signature.clone(), authorization: maximum(), permit: Some(permit) };
        precheck(terms.clone(), payload, Window::default(), now).map(drop).map_err(|why| why.reason.to_string())
    };
    let permit = upto::permit(usdc.address, FACILITATOR);
    assert_eq!(check(permit, 1_900_000_000), Ok(()));
    assert_eq!(check(permit, 1_900_000_001), Err("permit2_deadline_expired".to_owned()));
    let refused = |permit| check(permit, 1_900_000_000).unwrap_err();
    assert_eq!(refused(Permit { token: PAYEE, ..permit }), "permit2_token_mismatch");
    assert_eq!(refused(Permit { spender: PERMIT2, ..permit }), "invalid_permit2_spender");
    assert_eq!(refused(Permit { facilitator: Some(PAYEE), ..permit }), "upto_facilitator_mismatch");
    assert_eq!(permit.spender, PROXY);
}

/// The messages of the official client, server and facilitator.
fn recorded(name: &str) -> Value {
    let exchange: Value = serde_json::from_str(include_str!("../../vectors/upto_exchange.json")).unwrap();
    exchange[name].clone()
}

fn reads_back<T: Serialize + DeserializeOwned>(name: &str) -> T {
    let message = recorded(name);
    let read: T = serde_json::from_value(message.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(serde_json::to_value(&read).unwrap(), message, "{name}");
    read
}

#[test]
fn recorded_messages_are_read_and_written_as_they_were() {
    reads_back::<SupportedResponse>("supported");
    reads_back::<PaymentRequired>("required");
    reads_back::<PaymentPayload>("payment");
    // Recorded where the facilitator was called, and not its HTTP interface, which names the version.
    for name in ["verify", "settle"] {
        let mut request = recorded(name);
        request["x402Version"] = 2.into();
        let read: FacilitatorRequest = serde_json::from_value(request.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), request, "{name}");
    }
    reads_back::<VerifyResponse>("notApproved");
    reads_back::<VerifyResponse>("verified");
    for name in ["settled", "response", "chargedNothing", "exceeds"] {
        reads_back::<SettlementResponse>(name);
    }
}

#[test]
fn recorded_payment_is_its_payers_and_its_payload_is_written_as_it_was() {
    let payment = reads_back::<PaymentPayload>("payment");
    let offer = ExactOffer::try_from(&payment.accepted.read().unwrap()).unwrap();
    let payload = payment.payload.read().unwrap();
    assert_eq!(serde_json::to_value(&payload).unwrap(), recorded("payment")["payload"]);
    let now = u64::try_from(payload.authorization.valid_before).unwrap() - 10;
    let payment = precheck(Terms::new(offer).into(), payload, Window::default(), now).unwrap();
    assert_eq!(payment.authenticity(), Authenticity::Proven);
}

#[test]
fn numbers_are_strings_and_a_nonce_may_be_in_hex() {
    let payload = recorded("payment")["payload"].clone();
    let read = |value: Value| {
        let mut payload = payload.clone();
        payload["permit2Authorization"]["nonce"] = value;
        serde_json::from_value::<ExactPayload>(payload).ok().map(|read| read.authorization.nonce)
    };
    let nonce = U256::from_be_bytes(NONCE.0);
    for same in [nonce.to_string(), format!("0{nonce}"), format!("0x{nonce:x}"), format!("{NONCE}")] {
        assert_eq!(read(same.clone().into()), Some(NONCE), "{same}");
    }
    for none in
        [Value::from(7), "".into(), "0x".into(), "-1".into(), "+1".into(), "1e3".into(), format!("{NONCE}0").into()]
    {
        assert_eq!(read(none.clone()), None, "{none}");
    }
    let both = serde_json::json!({ "signature": "0x01", "authorization": maximum(), "permit2Authorization": payload["permit2Authorization"] });
    assert!(serde_json::from_value::<ExactPayload>(both).is_err());
    // The hash of a word of the specification, lest a vector is edited with its test.
    assert_eq!(
        keccak256("Witness(address to,address facilitator,uint256 validAfter)"),
        b256!("d4171c445a74218b01d4fd8af34ff1106580ea1e36ff837e64484bfaa2253b75")
    );
}
