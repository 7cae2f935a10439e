//! When channels are opened, and how much may be in them.

use std::{sync::Arc, time::Duration};

use alloy_primitives::{Address, B256, U256};

use crate::{eip3009::AuthorizationSigner, usdc::Usdc};

/// Makes a payer pay by vouchers, and limits what it puts into escrow.
///
/// A deposit needs room in the [`Budget`](crate::client::Budget), too. Escrow counts as reserved there, and what a seller charges moves
/// from there to spent. [`BudgetBuilder::per_payment`](crate::client::BudgetBuilder::per_payment) limits the price of a request, not the
/// deposit.
///
/// ```
/// # #[cfg(feature = "local-signer")]
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_x402::client::{ChannelPolicy, Payer, key};
///
/// let channels = ChannelPolicy::new().deposit("$0.05".parse()?).escrow_per_payee("$0.20".parse()?).lanes(4);
/// let payer = Payer::builder(key::from_env("STUDENT_PRIVATE_KEY")?).vouchers(channels).build();
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ChannelPolicy {
    pub(super) deposit: Option<Usdc>,
    pub(super) escrow_per_payee: Usdc,
    pub(super) escrow_total: Usdc,
    pub(in crate::client) exact_first: u64,
    pub(super) lanes: u32,
    pub(super) salt: B256,
    /// `None` for the payer's own key.
    pub(super) voucher_key: Option<Arc<dyn AuthorizationSigner>>,
}

impl ChannelPolicy {
    /// How many requests a deposit is for if neither the policy nor the seller says how large it should be.
    pub(super) const REQUESTS_PER_DEPOSIT: u64 = 10;
    /// The longest accepted time between the announcement of a withdrawal and the withdrawal: how long the money of a seller that does not
    /// answer any more is locked.
    pub(in crate::client) const MAX_WITHDRAW_DELAY: Duration = Duration::from_secs(24 * 60 * 60);

    /// Creates a policy with the defaults that each setting names.
    pub fn new() -> Self {
        Self {
            deposit: None,
            escrow_per_payee: Usdc::from_atomic(100_000),
            escrow_total: Usdc::from_atomic(500_000),
            exact_first: 0,
            lanes: 8,
            salt: B256::ZERO,
            voucher_key: None,
        }
    }

    /// Sets the size of a deposit. Default: what the seller suggests (`minDeposit`), or ten times the price.
    ///
    /// A deposit is smaller if a limit leaves no more room, and larger if the price asks for it.
    pub const fn deposit(mut self, amount: Usdc) -> Self {
        self.deposit = Some(amount);
        self
    }

    /// Sets the most that may be in escrow, uncharged, for each payee (`payTo`), in all its channels together. Default: $0.10.
    pub const fn escrow_per_payee(mut self, limit: Usdc) -> Self {
        self.escrow_per_payee = limit;
        self
    }

    /// Sets the most that may be in escrow, uncharged, for all payees together. Default: $0.50.
    pub const fn escrow_total(mut self, limit: Usdc) -> Self {
        self.escrow_total = limit;
        self
    }

    /// Sets for how many payments to a payee no channel is opened if the seller offers `exact` too. Default: 0.
    ///
    /// A deposit costs the seller the gas of about three `exact` payments. What was paid to the payee before, at this price, counts.
    pub const fn exact_first(mut self, payments: u64) -> Self {
        self.exact_first = payments;
        self
    }

    /// Sets how many channels (lanes) are opened to a payee at most; at least one. Default: 8.
    ///
    /// A channel carries one request at a time. A further one is opened when a request comes while all others are in use.
    pub const fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// Sets the salt of the first lane. Further lanes count up from it. Default: zero.
    ///
    /// Two programs that pay the same sellers with one key and with journals of their own must have different salts, far apart. After the
    /// loss of a journal, a payer with the same salt finds its channels again.
    pub const fn salt(mut self, salt: B256) -> Self {
        self.salt = salt;
        self
    }

    /// Sets a key that signs vouchers, so that the payer's own key signs deposits only. Default: the payer's own key.
    ///
    /// The key can spend what is in escrow, and nothing else. Another key makes other channels.
    pub fn voucher_key(mut self, key: impl AuthorizationSigner + 'static) -> Self {
        self.voucher_key = Some(Arc::new(key));
        self
    }

    /// Returns the salt of a lane.
    pub(super) fn salt_of(&self, lane: u32) -> B256 {
        U256::from_be_bytes(self.salt.0).wrapping_add(U256::from(lane)).into()
    }

    /// Returns the size of the next deposit for a request of this price, before limits.
    pub(super) fn target(&self, price: Usdc, min_deposit: Option<u128>) -> Usdc {
        let hint = min_deposit.and_then(|units| u64::try_from(units).ok()).map(Usdc::from_atomic);
        let usual = || price.checked_mul(Self::REQUESTS_PER_DEPOSIT).unwrap_or(Usdc::MAX);
        self.deposit.or(hint).unwrap_or_else(usual)
    }

    pub(super) fn voucher_address(&self, payer: Address) -> Address {
        self.voucher_key.as_ref().map_or(payer, |key| key.address())
    }
}

impl Default for ChannelPolicy {
    /// Returns the same as [`new`](Self::new).
    fn default() -> Self {
        Self::new()
    }
}

debug_fields!(ChannelPolicy |this| {
    deposit: this.deposit,
    escrow_per_payee: this.escrow_per_payee,
    escrow_total: this.escrow_total,
    exact_first: this.exact_first,
    lanes: this.lanes,
    voucher_key: this.voucher_key.as_ref().map(|key| key.address()),
});
