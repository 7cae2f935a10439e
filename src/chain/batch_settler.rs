//! The contract that settles many payments in one transaction: its address, and how it is deployed.

use alloy_primitives::{Address, B256, Bytes, address, b256, bytes};

/// The contract that executes many signed authorizations in one transaction.
///
/// It has no owner, no storage and no funds, and is at the same address on every chain. It can only execute what payers signed. The
/// source is `contracts/BatchSettler.sol`. If a chain lacks it, anybody may deploy it once, for about 190,000 gas: with
/// [`OnchainFacilitator::deploy_batch_settler`](crate::facilitator::OnchainFacilitator::deploy_batch_settler), or from any wallet by
/// sending [`deployment`](Self::deployment) to the [`DEPLOYER`](Self::DEPLOYER).
///
/// ```
/// use tower_x402::facilitator::BatchSettler;
///
/// let address = BatchSettler::DEPLOYER.create2_from_code(BatchSettler::SALT, BatchSettler::INIT_CODE);
/// assert_eq!(address, BatchSettler::ADDRESS);
/// ```
#[derive(Clone, Copy, Debug)]
pub enum BatchSettler {}

impl BatchSettler {
    /// Its address, on every chain on which it was deployed.
    pub const ADDRESS: Address = address!("cDBFFCEf7919287581100694b761e73EBAC7c4E5");

    /// The address of the deterministic deployment proxy, which deploys by CREATE2 (EIP-1014). Base, Ethereum, anvil and the devnet have
    /// it; for other chains see <https://github.com/Arachnid/deterministic-deployment-proxy>.
    pub const DEPLOYER: Address = address!("4e59b44847b379578588920cA78FbF26c0B4956C");

    /// The salt of its address.
    pub const SALT: B256 = B256::ZERO;

    /// The keccak256 hash of its code once it is deployed.
    pub const CODE_HASH: B256 = b256!("236274b1588ab798da1a0afdff3cb171fb2233feee64c90285bcdf7d6d14be18");

    /// Its creation code, from `contracts/artifacts`.
    pub const INIT_CODE: Bytes = bytes!(
        "6080604052348015600e575f5ffd5b506102728061001c5f395ff3fe608060405234801561000f575f5ffd5b505f3560601c60143560e01c80158061002d575061002b610110565b155b15610064576040517f07b6ad3f00000000000000000000000000000000000000000000000000000000815260040160405180910390fd5b8173ffffffffffffffffffffffffffffffffffffffff163b5f036100b4576040517f79d93f4900000000000000000000000000000000000000000000000000000000815260040160405180910390fd5b5f5f6100c08484610142565b91509150805f03610104576040517f94b7f4500000000000000000000000000000000000000000000000000000000081526004810183905260240160405180910390fd5b815f528060205260405ff35b5f60185b803560501c61ffff165f81900361012d575f9250505090565b608a0201601601368110610114573614919050565b5f5f612ee0603f84048401016040517fe3ee160e0000000000000000000000000000000000000000000000000000000081526018805b36811015610267578181036101a8578035606081901c602485015260501c61ffff16608a02810160169081019250015b835a106102675760018601955080358060601c803b156101c957505061025f565b60048501526bffffffffffffffffffffffff166044840152602081013560d881901c606485015260b01c64ffffffffff166084840152602a81013560a4840152601b606a82013560ff81901c9190910160c4850152604a82013560e48501527f7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff166101048401525f8061012485828c8cf1850194505b608a01610178565b50505050925092905056"
    );

    /// Returns the calldata that deploys it when sent to the [`DEPLOYER`](Self::DEPLOYER).
    pub fn deployment() -> Bytes {
        [Self::SALT.as_slice(), Self::INIT_CODE.as_ref()].concat().into()
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::keccak256;
    use serde::Deserialize;

    use super::*;

    #[test]
    fn address_follows_from_the_committed_artifact() {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Artifact {
            bytecode: Bytes,
            deployed_bytecode: Bytes,
        }
        let artifact: Artifact =
            serde_json::from_str(include_str!("../../contracts/artifacts/BatchSettler.json")).unwrap();
        assert_eq!(artifact.bytecode, BatchSettler::INIT_CODE);
        assert_eq!(keccak256(&artifact.deployed_bytecode), BatchSettler::CODE_HASH);
        // EIP-1014, by hand.
        let code_hash = keccak256(BatchSettler::INIT_CODE);
        let parts = [&[0xff], BatchSettler::DEPLOYER.as_slice(), BatchSettler::SALT.as_slice(), code_hash.as_slice()];
        assert_eq!(Address::from_slice(&keccak256(parts.concat())[12..]), BatchSettler::ADDRESS);
    }
}
