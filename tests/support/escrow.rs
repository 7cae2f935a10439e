//! Payment channels in tests: the escrow contract, and channels with money in them.

use alloy_primitives::{Address, B256, U256, address};
use alloy_provider::Provider as _;
use alloy_rpc_types_eth::TransactionReceipt;
use alloy_signer::SignerSync as _;
use alloy_signer_local::PrivateKeySigner;
use alloy_sol_types::SolCall;
use tower_x402::{
    Network,
    eip3009::TokenDomain,
    vouchers::{
        ChannelConfig, ChannelId, Claim, ClaimEntry, ClaimedVoucher, Deposit, Escrow, Voucher,
        abi::BatchSettlement::{self, depositCall},
    },
};

use crate::{
    authorization::random_nonce,
    chain::{Chain, Relayer, call, deployed_code},
};

/// Multicall3, through which channels are read.
pub const MULTICALL3: Address = address!("cA11bde05977b3631167028862bE2a173976CA11");

/// Puts the doubles of the escrow contract, its collector and Multicall3 where the official ones are. The devnet has them already.
///
/// The environment variable `TOWER_X402_ESCROW_CODE` names a file with other runtime code for the escrow contract, in hex.
pub async fn install(chain: &dyn Chain) {
    if let Some(path) = std::env::var_os("TOWER_X402_ESCROW_CODE") {
        let code = std::fs::read_to_string(path).expect("the file of TOWER_X402_ESCROW_CODE");
        chain.set_code(Escrow::ADDRESS, code.trim().parse().expect("runtime code in hex")).await;
    }
    for (address, contract) in [
        (Escrow::ADDRESS, "DevnetBatchSettlement"),
        (Escrow::ERC3009_COLLECTOR, "DevnetErc3009Collector"),
        (MULTICALL3, "DevnetMulticall3"),
    ] {
        if chain.provider().get_code_at(address).await.expect("eth_getCode").is_empty() {
            chain.set_code(address, deployed_code(contract)).await;
        }
    }
}

/// A channel, with the keys of both sides.
#[derive(Clone)]
pub struct Channel {
    pub config: ChannelConfig,
    pub payer: PrivateKeySigner,
    pub voucher_key: PrivateKeySigner,
    pub authorizer: PrivateKeySigner,
}

impl Channel {
    /// A channel of a new payer with money to deposit.
    pub async fn funded(chain: &dyn Chain, receiver: Address, authorizer: &PrivateKeySigner, units: u64) -> Self {
        let (payer, voucher_key) = (PrivateKeySigner::random(), PrivateKeySigner::random());
        chain.mint(payer.address(), units).await;
        let config = ChannelConfig {
            payer: payer.address(),
            payer_authorizer: voucher_key.address(),
            receiver,
            receiver_authorizer: authorizer.address(),
            token: chain.asset().address,
            withdraw_delay: 900,
            salt: B256::ZERO,
        };
        Self { config, payer, voucher_key, authorizer: authorizer.clone() }
    }

    pub fn escrow() -> Escrow {
        Escrow::on(Network::BASE_SEPOLIA)
    }

    pub fn id(&self) -> ChannelId {
        Self::escrow().channel_id(&self.config)
    }

    /// A deposit that can be executed until `valid_before`.
    pub async fn sign_deposit(&self, chain: &dyn Chain, units: u128, valid_before: u64) -> Deposit {
        let domain = TokenDomain::of(&chain.asset());
        let deposit = Deposit::sign(self.id(), units, valid_before, random_nonce(), &domain, &self.payer);
        deposit.await.expect("a local key signs")
    }

    pub fn deposit_call(&self, deposit: &Deposit) -> depositCall {
        depositCall {
            config: (&self.config).into(),
            amount: deposit.amount,
            collector: Escrow::ERC3009_COLLECTOR,
            collectorData: deposit.collector_data(),
        }
    }

    /// Deposits, and asserts that it worked.
    pub async fn deposit(&self, chain: &dyn Chain, relayer: &Relayer, units: u128) -> TransactionReceipt {
        let deposit = self.sign_deposit(chain, units, chain.timestamp().await + 3_600).await;
        let receipt = send(chain, relayer, &self.deposit_call(&deposit)).await;
        assert!(receipt.status(), "the deposit reverted");
        receipt
    }

    /// A voucher for `max`.
    pub fn voucher(&self, max: u128) -> Voucher {
        let digest = Self::escrow().voucher_digest(self.id(), max);
        let signature = self.voucher_key.sign_hash_sync(&digest).expect("a local key signs").as_bytes();
        let signature = signature.try_into().expect("a low s");
        Voucher { channel_id: self.id(), max_claimable_amount: max, signature }
    }

    /// A row that claims `total_claimed` on a voucher for `max`.
    pub async fn row(&self, max: u128, total_claimed: u128) -> Claim {
        let voucher = self.voucher(max);
        Claim {
            voucher: ClaimedVoucher { channel: self.config, max_claimable_amount: max },
            signature: voucher.signature,
            total_claimed,
        }
    }

    /// The channel's balance and what of it was claimed.
    pub async fn state(&self, chain: &dyn Chain) -> (u128, u128) {
        let asked = BatchSettlement::channelsCall { channelId: self.id().digest() };
        let state = call(chain.provider(), Escrow::ADDRESS, asked).await.expect("channels answers");
        (state.balance, state.totalClaimed)
    }
}

/// The call that claims these rows with the authorizer's signature.
pub fn claim_call(rows: &[Claim], authorizer: &PrivateKeySigner) -> BatchSettlement::claimWithSignatureCall {
    let escrow = Channel::escrow();
    let entries: Vec<ClaimEntry> = rows
        .iter()
        .map(|row| ClaimEntry {
            channel: escrow.channel_id(&row.voucher.channel),
            max_claimable_amount: row.voucher.max_claimable_amount,
            total_claimed: row.total_claimed,
        })
        .collect();
    let signature = authorizer.sign_hash_sync(&escrow.claim_batch_digest(&entries)).expect("a local key signs");
    BatchSettlement::claimWithSignatureCall {
        voucherClaims: rows.iter().map(Into::into).collect(),
        authorizerSignature: signature.as_bytes().to_vec().into(),
    }
}

/// The call that refunds `units` with the authorizer's signature.
pub fn refund_call(channel: &Channel, units: u128, nonce: u64) -> BatchSettlement::refundWithSignatureCall {
    let nonce = U256::from(nonce);
    let digest = Channel::escrow().refund_digest(channel.id(), nonce, units);
    let signature = channel.authorizer.sign_hash_sync(&digest).expect("a local key signs");
    BatchSettlement::refundWithSignatureCall {
        config: (&channel.config).into(),
        amount: units,
        nonce,
        receiverAuthorizerSignature: signature.as_bytes().to_vec().into(),
    }
}

/// Sends a call of the escrow contract and waits for its receipt. It is sent even if it will revert.
pub async fn send(chain: &dyn Chain, relayer: &Relayer, call: &impl SolCall) -> TransactionReceipt {
    relayer.send_with_gas(chain, Escrow::ADDRESS, call.abi_encode().into(), 15_000_000).await
}
