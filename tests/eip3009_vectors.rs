//! Hashing, signing and recovery agree with eth-account (`tests/vectors/make.py`), to the byte.

use alloy_primitives::{Address, B256, Bytes};
use alloy_signer_local::PrivateKeySigner;
use serde::{Deserialize, Deserializer, de::Error};
use tower_x402::{
    Asset, Network,
    eip3009::{Authorization, AuthorizationSigner, PaymentSignature, RecoverError, TokenDomain},
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Vector {
    label: String,
    #[serde(deserialize_with = "asset")]
    domain: Asset,
    private_key: B256,
    authorization: Authorization,
    domain_separator: B256,
    digest: B256,
    signature: Bytes,
    high_s: Bytes,
}

impl Vector {
    fn token_domain(&self) -> TokenDomain {
        TokenDomain::of(&self.domain)
    }

    fn recover(&self, signature: &[u8]) -> Result<Address, RecoverError> {
        PaymentSignature::from(signature.to_vec()).recover(self.authorization.signing_hash(&self.token_domain()))
    }
}

#[test]
fn every_hash_agrees() {
    for vector in vectors() {
        let domain = vector.token_domain();
        assert_eq!(domain.separator(), vector.domain_separator, "{}", vector.label);
        assert_eq!(vector.authorization.signing_hash(&domain), vector.digest, "{}", vector.label);
    }
}

#[test]
fn every_signature_names_its_payer() {
    for vector in vectors() {
        assert_eq!(vector.recover(&vector.signature), Ok(vector.authorization.from), "{}", vector.label);
    }
}

#[tokio::test]
async fn signing_gives_the_same_bytes() {
    for vector in vectors() {
        let signer = PrivateKeySigner::from_bytes(&vector.private_key).unwrap();
        let signature =
            AuthorizationSigner::sign(&signer, &vector.authorization, &vector.token_domain()).await.unwrap();
        assert_eq!(signature.as_bytes(), &vector.signature[..], "{}", vector.label);
    }
}

#[test]
fn what_usdc_refuses_is_refused() {
    for vector in vectors() {
        let label = &vector.label;
        assert_eq!(vector.recover(&vector.high_s), Err(RecoverError::HighS), "{label}");

        let (rs, v) = vector.signature.split_at(64);
        let with_v = |v: u8| vector.recover(&[rs, &[v]].concat());
        for v in [0, 1, 26, 29, 35, 255] {
            assert_eq!(with_v(v), Err(RecoverError::RecoveryId(v)), "{label}");
        }
        assert_ne!(with_v(55 - v[0]), Ok(vector.authorization.from), "{label}");
        assert_eq!(vector.recover(rs), Err(RecoverError::Length(64)), "{label}");
    }
}

fn vectors() -> Vec<Vector> {
    #[derive(Deserialize)]
    struct File {
        cases: Vec<Vector>,
    }
    let file: File = serde_json::from_str(include_str!("vectors/eip3009.json")).unwrap();
    assert!(file.cases.len() >= 12);
    file.cases
}

fn asset<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Asset, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Domain {
        name: String,
        version: String,
        chain_id: String,
        verifying_contract: Address,
    }
    let domain = Domain::deserialize(deserializer)?;
    let network = Network::eip155(domain.chain_id.parse().map_err(D::Error::custom)?);
    Ok(Asset::new(network, domain.verifying_contract, domain.name, domain.version))
}
