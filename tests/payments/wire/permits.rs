//! Messages and digests of `exact` by Permit2: those of its documents' vectors, and those that the official packages exchanged.

use alloy_primitives::{Address, B256, U256, address, b256};
use alloy_signer_local::PrivateKeySigner;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tower_x402::{
    Network,
    eip3009::{Authorization, AuthorizationSigner as _},
    payment::{Authenticity, PaymentKey, Terms, Window, precheck},
    permit2::{PERMIT2, PROXY, Permit},
    protocol::{
        ExactOffer, ExactPayload, FacilitatorRequest, PaymentPayload, PaymentRequired, PaymentRequirements,
        SettlementResponse, TransferMethod, VerifyResponse,
    },
};

const PAYER: Address = address!("7E5F4552091A69125d5DfCb7b8C2659029395Bdf");
const PAYEE: Address = address!("6813Eb9362372EEF6200f3b1dbC3f819671cBA69");
const NONCE: B256 = b256!("1111111111111111111111111111111111111111111111111111111111111107");

const VECTORS: [(Network, B256, &str); 2] = [
    (
        Network::BASE_SEPOLIA,
        b256!("f11b758feddc48df7d6d854476f9fd75d706367c0fd9866d09aedd029cc62886"),
        "0x496aeff9508f1cc26b50ad6d33878f75adc41012f99467063031e52b8edec69109a6ad494d212ede85a10792d9338218efe8a449b9c6efc0786c928cdf5120761b",
    ),
    (
        Network::BASE,
        b256!("1e03c0f80673c169dc47e89a10a32ea877d1ddca458b134fe303a12fbb984e47"),
        "0xf9da4a913a8a1d6b059fe0831c2a10e6249aa7f5a77913b40cf7b202a2468370264aea4f03198ae87ea638f4db40c40964b586eb691b44fcf52697e563b80f9a1c",
    ),
];

fn transfer() -> Authorization {
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
    let signer = PrivateKeySigner::from_bytes(&B256::with_last_byte(1)).unwrap();
    for (network, digest, signed) in VECTORS {
        let usdc = network.usdc().unwrap();
        let permit = Permit::new(usdc.address);
        assert_eq!(permit.signing_hash(&transfer(), &Permit::domain(network)), digest);
        let signature = signer.sign_digest(digest).await.unwrap();
        assert_eq!(serde_json::to_value(&signature).unwrap(), signed);
        // As terms of an offer, it is the payer's, and its nonce is Permit2's whatever the token.
        let offer = ExactOffer::new(usdc, U256::from(10_000), PAYEE, 300).by_permit();
        let payload = ExactPayload { signature, authorization: transfer(), permit: Some(permit) };
        let check = |now| precheck(Terms::new(offer.clone()).into(), payload.clone(), Window::default(), now);
        let payment = check(1_899_999_800).unwrap();
        assert_eq!((payment.authenticity(), payment.signing_hash()), (Authenticity::Proven, digest));
        assert_eq!(payment.key(), PaymentKey { network, asset: PERMIT2, payer: PAYER, nonce: NONCE });
        // It is valid up to its deadline.
        assert!(check(1_900_000_000).is_ok());
        assert_eq!(check(1_900_000_001).unwrap_err().reason.as_str(), "permit2_deadline_expired");
    }
}

/// The messages of the official client, server and facilitator.
fn recorded(name: &str) -> Value {
    let exchange: Value = serde_json::from_str(include_str!("../../vectors/exact_permit_exchange.json")).unwrap();
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
    reads_back::<PaymentRequired>("required");
    reads_back::<VerifyResponse>("verified");
    reads_back::<SettlementResponse>("settled");
    reads_back::<SettlementResponse>("response");
    let body = serde_json::json!({
        "x402Version": 2, "paymentPayload": recorded("payment"), "paymentRequirements": recorded("requirements"),
    });
    let read: FacilitatorRequest = serde_json::from_value(body.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), body);
}

#[test]
fn recorded_payment_is_its_payers_and_for_the_recorded_offer() {
    let payment = reads_back::<PaymentPayload>("payment");
    let offered = reads_back::<PaymentRequirements>("requirements");
    let accepted = payment.accepted.read().unwrap();
    assert!(offered.is_accepted_as(&accepted));
    let offer = ExactOffer::try_from(&accepted).unwrap();
    assert_eq!((offer.method, offer.to_requirements()), (TransferMethod::Permit, accepted));
    let payload = payment.payload.read().unwrap();
    assert_eq!(payload.permit.unwrap().spender, PROXY);
    assert_eq!(serde_json::to_value(&payload).unwrap(), recorded("payment")["payload"]);
    let now = u64::try_from(payload.authorization.valid_before).unwrap() - 10;
    let payment = precheck(Terms::new(offer).into(), payload, Window::default(), now).unwrap();
    assert_eq!(payment.authenticity(), Authenticity::Proven);
}

/// An offer without the field is one of an authorization, which a permit does not pay.
#[test]
fn offer_by_permit_is_not_accepted_in_place_of_the_other() {
    let by_permit = reads_back::<PaymentRequirements>("requirements");
    let mut other = by_permit.clone();
    other.extra.remove("assetTransferMethod");
    assert!(!other.is_accepted_as(&by_permit) && !by_permit.is_accepted_as(&other));
}
