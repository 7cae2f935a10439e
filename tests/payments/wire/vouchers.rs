//! The messages and digests of payment channels, held against the official packages: vectors, and an exchange recorded from them.

use alloy_primitives::{Address, B256, U256, address, b256};
use alloy_signer_local::PrivateKeySigner;
use proptest::prelude::*;
use serde_json::{Value, json};
use tower_x402::{
    Network,
    eip3009::{PaymentSignature, TokenDomain},
    vouchers::{
        ChannelConfig, ChannelId, ChannelOffer, ChannelOfferError, ChannelPayload, ChannelState, ClaimEntry, Deposit,
        DepositAuthorization, Escrow, InvalidVoucherSignature, Voucher, VoucherSignature, VoucherState,
    },
};

const PAYER_KEY: B256 = b256!("5de4111afa1a4b94908f83103eb1f1706367c2e68ca870fc3fb9a804cdab365a");
const VOUCHER_KEY: B256 = b256!("7c852118294e51e653712a81e05800f419141751be58f605c371e15141b007a6");
const AUTHORIZER_KEY: B256 = b256!("59c6995e998f97a5a0044966f0945389dc9e86dae88c7a8412f4603b6b78690d");

/// What `viem`, `@x402/evm` 2.27.0 and the contract agree on, for one chain.
struct Vectors {
    network: Network,
    separator: B256,
    channel: &'static str,
    voucher: B256,
    voucher_signature: &'static str,
    refund: B256,
    refund_signature: &'static str,
    claim_batch: B256,
    claim_batch_signature: &'static str,
    deposit_nonce: B256,
}

const VECTORS: [Vectors; 2] = [
    Vectors {
        network: Network::BASE_SEPOLIA,
        separator: b256!("fdef80764086b1e0fc6ba99f0cb9aa1d59109fda7c23d60334c89d2de44dffce"),
        channel: "0x78c8da75c41f351d88afa4218f450208345ec54d061b0f0ce0c4200b24f1876a",
        voucher: b256!("5a4409b0788f68119b7e748c4ba966c63e1ba9e751092c00e4d396f9cf23f3be"),
        voucher_signature: "0xef56ddc99c86c8a7af3077fe77fc138c647c1097e9229a86bb26b3ab462cd6e15ac8a902856fb26716e61d300e95e5d5b6cfe0afeef9cd805c261a1c484f481b1b",
        refund: b256!("477fdfc246782f1b0a9835b9ad196c50df0f90abaab450839942b45a04b686fc"),
        refund_signature: "0x25d5dd7e435c24604497b67bec7403ff9a72e72ed241c8b95e8e4515a163c307291886ef438645fa2d68aa167cfce80f0d2d37013a6365dbaef095204bba7c821b",
        claim_batch: b256!("cd6700f3abeec980cfc7be5d0d2a389b8b4e044fca8ffe452af41a6279d9df11"),
        claim_batch_signature: "0x8e8437fe272ecd7f7cbcbebdd140cb838093d8922fbc07adfd237a741b5a31b02926fa6943395e97dd12d11948ed328b2dfbda3ca514f3b20bd93fcb1c4feb8f1b",
        deposit_nonce: b256!("241248682f2a8fed2050deb963c68f1ff477656c10e29d9f5d5498d15c089a57"),
    },
    Vectors {
        network: Network::BASE,
        separator: b256!("d8d982716899b0e20cf2c1e706a37b8a892c83fdd4ac9b540cfeec11f9c73a39"),
        channel: "0x36a748d7e1f8e00ffe0a64835a2bc944d5def48b30d1caa5d27c98855e3ca531",
        voucher: b256!("fda11677bbaeaaef9e387c49a7ee505136aee5c45fd3b1d6953805cb9348b9b7"),
        voucher_signature: "0x0d51a896f37baae7437042bbaa35a576204cb457e2ceae611bd8aed3e598950775d93570c879adb5dd1605a2aeb1420c4dfb83cf184c7b64a4a329d32f7b32c91c",
        refund: b256!("290ac0fbde9c322097ec4bf9a49e08de775f4d9318e77f09cf39ab533ef39f53"),
        refund_signature: "0x321e954b72014af8325f679f462a813d5c63e6af89f63be4b4e2d76efa6298a16face0401bda141100ba5b44f653531020656080ed31f06364a1306f4ac3bd0d1b",
        claim_batch: b256!("093ff2ceacc50555fca1278e7f4b126f85d2ea6624adcbeeaccd1301f27f7ee1"),
        claim_batch_signature: "0xa8e214f5c1422f5a04ddb7756ed9a12ba7f664baddab8e5ee28ee87092465e6d2c46cc170329bcee47eb24ee839cd70d263e22b516967b3ca0a1cad8a0522cca1c",
        deposit_nonce: b256!("687a7855e52691b833b90a9f2d5ec5733e4e65cf8f209844fb00ea2ceb92c7b6"),
    },
];

const DEPOSIT_SALT: B256 = b256!("cbbc8a448a2b515bca10c19dc0d7387a9069325d7d9578ae67cf80acae5a34b2");

fn config() -> ChannelConfig {
    ChannelConfig {
        payer: address!("3C44CdDdB6a900fa2b585dd299e03d12FA4293BC"),
        payer_authorizer: address!("90F79bf6EB2c4f870365E785982E1f101E93b906"),
        receiver: address!("9965507D1a55bcC2695C58ba16FB37d819B0A4dc"),
        receiver_authorizer: address!("70997970C51812dc3A010C7d01b50e0d17dc79C8"),
        token: Network::BASE_SEPOLIA.usdc().unwrap().address,
        withdraw_delay: 900,
        salt: B256::ZERO,
    }
}

fn key(secret: B256) -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&secret).unwrap()
}

fn recovered(signature: &str, digest: B256) -> Address {
    let signature: PaymentSignature = serde_json::from_value(json!(signature)).unwrap();
    signature.recover(digest).unwrap()
}

#[tokio::test]
async fn digests_and_signatures_are_those_of_the_official_packages() {
    for vectors in VECTORS {
        let escrow = Escrow::on(vectors.network);
        assert_eq!(escrow.separator(), vectors.separator);
        let channel = escrow.channel_id(&config());
        assert_eq!(channel.to_string(), vectors.channel);

        assert_eq!(escrow.voucher_digest(channel, 2_000), vectors.voucher);
        let voucher = Voucher::sign(&escrow, channel, 2_000, &key(VOUCHER_KEY)).await.unwrap();
        assert_eq!(voucher.signature, vectors.voucher_signature.parse().unwrap());
        assert!(voucher.is_of(&config(), &escrow));

        let authorizer = key(AUTHORIZER_KEY).address();
        assert_eq!(escrow.refund_digest(channel, U256::ZERO, 4_700), vectors.refund);
        assert_eq!(recovered(vectors.refund_signature, vectors.refund), authorizer);

        let entry = ClaimEntry { channel, max_claimable_amount: 5_300, total_claimed: 5_300 };
        assert_eq!(escrow.claim_batch_digest(&[entry]), vectors.claim_batch);
        assert_eq!(recovered(vectors.claim_batch_signature, vectors.claim_batch), authorizer);

        assert_eq!(Deposit::nonce(channel, DEPOSIT_SALT), vectors.deposit_nonce);
    }
}

#[test]
fn the_digest_of_a_batch_depends_on_its_rows_and_their_order() {
    let escrow = Escrow::on(Network::BASE_SEPOLIA);
    let row = |channel: ChannelId, max_claimable_amount, total_claimed| ClaimEntry {
        channel,
        max_claimable_amount,
        total_claimed,
    };
    let first = row(escrow.channel_id(&config()), 5_300, 4_300);
    let second = row(B256::repeat_byte(0x11).into(), 1, 1);
    let digest = b256!("85c723d8764ce2a1719eb94d2536c7e95042f01ccdd138d9216ccd4013655008");
    assert_eq!(escrow.claim_batch_digest(&[first, second]), digest);
    assert_ne!(escrow.claim_batch_digest(&[second, first]), digest);
    let empty = b256!("57b970b91bd540b4ca1aa82be12adbc9b769b6e978e5285b2a859bd989304e9a");
    assert_eq!(escrow.claim_batch_digest(&[]), empty);
}

#[tokio::test]
async fn a_deposit_is_signed_and_encoded_as_the_official_client_does() {
    let channel = Escrow::on(Network::BASE_SEPOLIA).channel_id(&config());
    let domain = TokenDomain::of(&Network::BASE_SEPOLIA.usdc().unwrap());
    let payer = key(PAYER_KEY);
    let deposit = Deposit::sign(channel, 10_000, 1_795_445_685, DEPOSIT_SALT, &domain, &payer).await.unwrap();
    let digest = b256!("e36df44841099d609a1b9032362b9c44ca59dad6a54e23c2fd4c748eb9183cfc");
    assert_eq!(deposit.digest(payer.address(), channel, &domain), digest);
    let DepositAuthorization::Erc3009 { signature, .. } = &deposit.authorization else { unreachable!() };
    let expected = "0xb5c4cf63accf036150f636d58839e8f07134f1251179ded17fb64178cc7dd0763ba433d4eaa3a6015b7546a70d1d9eea2165dae5dcab970fd61869a9ddd75f8b1b";
    assert_eq!(serde_json::to_value(signature).unwrap(), json!(expected));
    let words = [U256::ZERO, U256::from(0x6b0453b5), DEPOSIT_SALT.into(), U256::from(0x80), U256::from(0x41)];
    let mut data: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes::<32>()).collect();
    data.extend_from_slice(signature.as_bytes());
    data.resize(5 * 32 + 96, 0);
    assert_eq!(deposit.collector_data(), data);
}

/// An exchange between the official client, server and facilitator (`@x402/evm` 2.27.0): deposit, vouchers, an actual price, a failed
/// handler, a corrective 402, claim, settle and refund.
fn recording() -> Value {
    let path = support::repository().join("tests/vectors/batch_settlement_exchange.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Calls `look` with every value in the JSON, and the name of its field.
fn walk(value: &Value, name: &str, look: &mut impl FnMut(&str, &Value)) {
    look(name, value);
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| walk(value, name, look)),
        Value::Array(values) => values.iter().for_each(|value| walk(value, "", look)),
        _ => {}
    }
}

#[test]
fn every_recorded_message_is_read_and_written_back_as_it_was() {
    let recorded = recording();
    let (mut payloads, mut offers, mut states) = (0, 0, 0);
    walk(&recorded, "", &mut |name, value| match (name, value) {
        ("payload", Value::Object(_)) => {
            let payload: ChannelPayload =
                serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"));
            assert_eq!(&serde_json::to_value(&payload).unwrap(), value);
            payloads += 1;
        }
        ("extra", Value::Object(extra)) if extra.contains_key("withdrawDelay") => {
            let offer = ChannelOffer::try_from(extra).unwrap_or_else(|error| panic!("{error}: {value}"));
            assert_eq!(&serde_json::to_value(&offer).unwrap(), value);
            offers += 1;
        }
        ("channelState", Value::Object(_)) => {
            let state: ChannelState =
                serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error}: {value}"));
            assert_eq!(&serde_json::to_value(state).unwrap(), value);
            states += 1;
        }
        ("voucherState", Value::Object(_)) => {
            let state: VoucherState = serde_json::from_value(value.clone()).unwrap();
            assert_eq!(&serde_json::to_value(state).unwrap(), value);
        }
        _ => {}
    });
    assert!(payloads >= 20 && offers >= 30 && states >= 10, "{payloads} payloads, {offers} offers, {states} states");
}

#[test]
fn every_recorded_voucher_is_of_its_channel() {
    let recorded = recording();
    let escrow = Escrow::on(Network::BASE_SEPOLIA);
    let mut vouchers = 0;
    walk(&recorded, "", &mut |name, value| {
        if name == "payload"
            && let Ok(
                ChannelPayload::Voucher { channel_config, voucher }
                | ChannelPayload::Deposit { channel_config, voucher, .. },
            ) = serde_json::from_value(value.clone())
        {
            assert!(voucher.is_of(&channel_config, &escrow));
            assert!(!voucher.is_of(&channel_config, &Escrow::on(Network::BASE)), "of another chain");
            let other = ChannelConfig { salt: B256::repeat_byte(1), ..channel_config };
            assert!(!voucher.is_of(&other, &escrow), "of another channel");
            vouchers += 1;
        }
    });
    assert!(vouchers >= 10, "{vouchers} vouchers");
}

#[test]
fn a_signature_that_the_contract_refuses_is_not_read() {
    let good = VECTORS[0].voucher_signature;
    assert!(good.parse::<VoucherSignature>().is_ok());
    let with_v = |v: &str| format!("{}{v}", &good[..130]);
    for (v, number) in [("00", 0), ("01", 1), ("1d", 29)] {
        assert_eq!(with_v(v).parse::<VoucherSignature>(), Err(InvalidVoucherSignature::RecoveryId(number)));
    }
    let high_s = format!("{}{}1c", &good[..66], "f".repeat(64));
    assert_eq!(high_s.parse::<VoucherSignature>(), Err(InvalidVoucherSignature::HighS));
    let compact = good[..130].to_owned();
    for text in [&good[2..], &compact, &format!("{good}00"), "0x", ""] {
        assert_eq!(text.parse::<VoucherSignature>(), Err(InvalidVoucherSignature::Hex), "{text}");
    }
    let shown = format!("{:?}", good.parse::<VoucherSignature>().unwrap());
    assert!(!shown.contains("ef56"), "the signature is money: {shown}");
}

#[test]
fn what_another_implementation_would_read_otherwise_is_refused() {
    let good = json!({
        "type": "voucher",
        "channelConfig": config(),
        "voucher": {
            "channelId": VECTORS[0].channel,
            "maxClaimableAmount": "2000",
            "signature": VECTORS[0].voucher_signature,
        },
    });
    assert!(serde_json::from_value::<ChannelPayload>(good.clone()).is_ok());
    let changed = |pointer: &str, value: Value| {
        let mut message = good.clone();
        *message.pointer_mut(pointer).unwrap() = value;
        serde_json::from_value::<ChannelPayload>(message)
    };
    for amount in
        [json!("02000"), json!(2000), json!("2e3"), json!("-1"), json!((u128::MAX).to_string() + "0"), json!("")]
    {
        assert!(changed("/voucher/maxClaimableAmount", amount.clone()).is_err(), "{amount}");
    }
    for id in [json!("0x12"), json!("../x"), json!(VECTORS[0].channel.trim_start_matches("0x"))] {
        assert!(changed("/voucher/channelId", id.clone()).is_err(), "{id}");
    }
    for delay in [json!("900"), json!(-1), json!(900.5), json!(1_u64 << 40)] {
        assert!(changed("/channelConfig/withdrawDelay", delay.clone()).is_err(), "{delay}");
    }
    assert!(changed("/type", json!("close")).is_err());
    let upper = VECTORS[0].channel.to_uppercase().replace("0X", "0x");
    let payload = changed("/voucher/channelId", json!(upper)).unwrap();
    let ChannelPayload::Voucher { voucher, .. } = payload else { panic!("a voucher") };
    assert_eq!(voucher.channel_id.to_string(), VECTORS[0].channel, "one channel in either case");
    let twice = r#"{"maxClaimableAmount":"1","maxClaimableAmount":"2","channelId":"ID","signature":"SIG"}"#
        .replace("ID", VECTORS[0].channel)
        .replace("SIG", VECTORS[0].voucher_signature);
    assert!(serde_json::from_str::<Voucher>(&twice).is_err(), "a field given twice");
}

#[test]
fn an_offer_that_asks_for_what_is_not_implemented_is_refused_by_name() {
    let extra = |field: &str, value: &str| {
        let extra = json!({
            "name": "USDC",
            "version": "2",
            "receiverAuthorizer": config().receiver_authorizer.to_string(),
            field: value,
        });
        ChannelOffer::try_from(extra.as_object().unwrap())
    };
    let offer = extra("assetTransferMethod", "eip3009").unwrap();
    assert_eq!((offer.withdraw_delay, offer.min_deposit), (900, None), "the defaults");
    assert!(extra("voucherManager", "server").is_ok());
    for (field, value) in [("assetTransferMethod", "permit2"), ("voucherManager", "facilitator")] {
        assert!(
            matches!(extra(field, value), Err(ChannelOfferError::NotSupported { field: named, .. }) if named == field)
        );
    }
    assert!(matches!(extra("minDeposit", "01"), Err(ChannelOfferError::Unreadable(_))));
}

proptest! {
    #[test]
    fn a_channel_differs_from_one_that_differs_in_one_field(config in any_config(), field in 0..7_usize, chain in 1..1_000_000_u64) {
        let escrow = Escrow::on(Network::eip155(chain));
        let mut other = config;
        match field {
            0 => other.payer = flip(other.payer),
            1 => other.payer_authorizer = flip(other.payer_authorizer),
            2 => other.receiver = flip(other.receiver),
            3 => other.receiver_authorizer = flip(other.receiver_authorizer),
            4 => other.token = flip(other.token),
            5 => other.withdraw_delay ^= 1,
            _ => other.salt.0[31] ^= 1,
        }
        prop_assert_ne!(escrow.channel_id(&config), escrow.channel_id(&other));
        prop_assert_ne!(escrow.channel_id(&config), Escrow::on(Network::eip155(chain + 1)).channel_id(&config));
        let json = serde_json::to_string(&config).unwrap();
        prop_assert_eq!(serde_json::from_str::<ChannelConfig>(&json).unwrap(), config);
    }
}

fn flip(mut address: Address) -> Address {
    address.0[19] ^= 1;
    address
}

fn any_config() -> impl Strategy<Value = ChannelConfig> {
    any::<([u8; 20], [u8; 20], [u8; 20], [u8; 20], [u8; 20], u32, [u8; 32])>().prop_map(
        |(payer, payer_authorizer, receiver, receiver_authorizer, token, withdraw_delay, salt)| ChannelConfig {
            payer: payer.into(),
            payer_authorizer: payer_authorizer.into(),
            receiver: receiver.into(),
            receiver_authorizer: receiver_authorizer.into(),
            token: token.into(),
            withdraw_delay,
            salt: salt.into(),
        },
    )
}
