//! The escrow contract on one chain, and what is signed for it.

use std::sync::LazyLock;

use alloy_primitives::{Address, B256, U256, address, keccak256};
use alloy_sol_types::{Eip712Domain, SolStruct};

use super::{ChannelConfig, ChannelId, abi};
use crate::network::Network;

/// The structs under their names in EIP-712.
pub(super) mod typed {
    alloy_sol_types::sol! {
        struct Voucher {
            bytes32 channelId;
            uint128 maxClaimableAmount;
        }

        struct Refund {
            bytes32 channelId;
            uint256 nonce;
            uint128 amount;
        }

        struct ClaimEntry {
            bytes32 channelId;
            uint128 maxClaimableAmount;
            uint128 totalClaimed;
        }

        struct ClaimBatch {
            ClaimEntry[] claims;
        }
    }
}

// Each request takes several of these digests, and hashing a type or a domain costs more than the rest of a digest.
static CHANNEL_CONFIG_TYPE: LazyLock<B256> =
    LazyLock::new(|| keccak256(abi::ChannelConfig::eip712_encode_type().as_bytes()));
static VOUCHER_TYPE: LazyLock<B256> = LazyLock::new(|| keccak256(typed::Voucher::eip712_encode_type().as_bytes()));
static KNOWN: LazyLock<[Escrow; 2]> = LazyLock::new(|| [Network::BASE, Network::BASE_SEPOLIA].map(Escrow::hashed));

/// The contract `x402BatchSettlement` on one chain. It has the same address everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Escrow {
    network: Network,
    separator: B256,
}

/// One row of a signed batch of claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimEntry {
    /// The channel.
    pub channel: ChannelId,
    /// The ceiling that the payer signed, in atomic units.
    pub max_claimable_amount: u128,
    /// What will have been claimed in all, in atomic units.
    pub total_claimed: u128,
}

impl Escrow {
    /// The contract that holds the deposits.
    pub const ADDRESS: Address = address!("4020074e9dF2ce1deE5A9C1b5c3f541D02a10003");
    /// The contract that pulls a deposit with an ERC-3009 authorization; the authorization's `to`.
    pub const ERC3009_COLLECTOR: Address = address!("4020806089470a89826cB9fB1f4059150b550004");

    /// Returns the contract on this chain.
    pub fn on(network: Network) -> Self {
        KNOWN.iter().find(|known| known.network == network).cloned().unwrap_or_else(|| Self::hashed(network))
    }

    fn hashed(network: Network) -> Self {
        Self { network, separator: domain(network).separator() }
    }

    /// Returns the chain.
    pub const fn network(&self) -> Network {
        self.network
    }

    /// Returns the contract's EIP-712 domain, for signers that show what they sign.
    pub fn domain(&self) -> Eip712Domain {
        domain(self.network)
    }

    /// Returns the EIP-712 domain separator.
    pub const fn separator(&self) -> B256 {
        self.separator
    }

    /// Returns the id of the channel with these fields.
    pub fn channel_id(&self, config: &ChannelConfig) -> ChannelId {
        self.digest(hash_struct(&CHANNEL_CONFIG_TYPE, &abi::ChannelConfig::from(config))).into()
    }

    /// Returns the digest that a payer signs: "of this channel at most `max_claimable_amount` may be claimed in all".
    pub fn voucher_digest(&self, channel: ChannelId, max_claimable_amount: u128) -> B256 {
        self.digest(hash_struct(&VOUCHER_TYPE, &typed_voucher(channel, max_claimable_amount)))
    }

    /// Returns the digest that a receiver's authorizer signs to refund up to `amount`. `nonce` is the contract's `refundNonce` of the
    /// channel.
    pub fn refund_digest(&self, channel: ChannelId, nonce: U256, amount: u128) -> B256 {
        self.digest(typed::Refund { channelId: channel.digest(), nonce, amount }.eip712_hash_struct())
    }

    /// Returns the digest that a receiver's authorizer signs to claim these rows, in this order.
    pub fn claim_batch_digest(&self, entries: &[ClaimEntry]) -> B256 {
        let claims = entries.iter().map(|entry| typed::ClaimEntry {
            channelId: entry.channel.digest(),
            maxClaimableAmount: entry.max_claimable_amount,
            totalClaimed: entry.total_claimed,
        });
        self.digest(typed::ClaimBatch { claims: claims.collect() }.eip712_hash_struct())
    }

    fn digest(&self, struct_hash: B256) -> B256 {
        keccak256([b"\x19\x01", self.separator.as_slice(), struct_hash.as_slice()].concat())
    }
}

/// Returns `hashStruct` of EIP-712.
fn hash_struct(type_hash: &B256, typed: &impl SolStruct) -> B256 {
    keccak256([type_hash.as_slice(), &typed.eip712_encode_data()].concat())
}

fn domain(network: Network) -> Eip712Domain {
    Eip712Domain::new(
        Some("x402 Batch Settlement".into()),
        Some("1".into()),
        Some(U256::from(network.chain_id())),
        Some(Escrow::ADDRESS),
        None,
    )
}

/// Returns the typed data of a voucher, which a hardware wallet can show.
pub(super) fn typed_voucher(channel: ChannelId, max_claimable_amount: u128) -> typed::Voucher {
    typed::Voucher { channelId: channel.digest(), maxClaimableAmount: max_claimable_amount }
}
