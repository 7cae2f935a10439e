//! The functions, events and errors of the escrow contract.

use alloy_primitives::aliases::U40;

alloy_sol_types::sol! {
    /// What makes a channel. Its name is part of what is hashed to a channel's id.
    #[derive(Debug, PartialEq, Eq)]
    struct ChannelConfig {
        address payer;
        address payerAuthorizer;
        address receiver;
        address receiverAuthorizer;
        address token;
        uint40 withdrawDelay;
        bytes32 salt;
    }

    /// A voucher, with the channel's configuration in place of its id.
    #[derive(Debug, PartialEq, Eq)]
    struct SignedVoucher {
        ChannelConfig channel;
        uint128 maxClaimableAmount;
    }

    /// One row of a batch of claims.
    #[derive(Debug, PartialEq, Eq)]
    struct VoucherClaim {
        SignedVoucher voucher;
        bytes signature;
        uint128 totalClaimed;
    }

    /// `x402BatchSettlement`.
    #[derive(Debug, PartialEq, Eq)]
    interface BatchSettlement {
        /// Fills a channel.
        function deposit(ChannelConfig config, uint128 amount, address collector, bytes collectorData) external;
        /// Claims, called by each row's receiver or its authorizer.
        function claim(VoucherClaim[] voucherClaims) external;
        /// Claims with the authorizer's signature, called by anybody.
        function claimWithSignature(VoucherClaim[] voucherClaims, bytes authorizerSignature) external;
        /// Transfers to the receiver what was claimed for it.
        function settle(address receiver, address token) external;
        /// Announces a withdrawal; called by the payer or its authorizer.
        function initiateWithdraw(ChannelConfig config, uint128 amount) external;
        /// Withdraws after the delay.
        function finalizeWithdraw(ChannelConfig config) external;
        /// Refunds the payer, called by the receiver or its authorizer.
        function refund(ChannelConfig config, uint128 amount) external;
        /// Refunds the payer with the authorizer's signature, called by anybody.
        function refundWithSignature(ChannelConfig config, uint128 amount, uint256 nonce, bytes receiverAuthorizerSignature) external;
        /// Makes several of these calls in one.
        function multicall(bytes[] data) external returns (bytes[] results);
        /// What is in a channel, and what of it was claimed.
        function channels(bytes32 channelId) external view returns (uint128 balance, uint128 totalClaimed);
        /// A withdrawal that was announced.
        function pendingWithdrawals(bytes32 channelId) external view returns (uint128 amount, uint40 initiatedAt);
        /// The nonce of the channel's next signed refund.
        function refundNonce(bytes32 channelId) external view returns (uint256);
        /// What was claimed for a receiver, and what of it was transferred.
        function receivers(address receiver, address token) external view returns (uint128 totalClaimed, uint128 totalSettled);
        /// A channel's id.
        function getChannelId(ChannelConfig config) external view returns (bytes32);
        /// What a payer signs.
        function getVoucherDigest(bytes32 channelId, uint128 maxClaimableAmount) external view returns (bytes32);
        /// What the authorizer signs to refund.
        function getRefundDigest(bytes32 channelId, uint256 nonce, uint128 amount) external view returns (bytes32);
        /// What the authorizer signs to claim.
        function getClaimBatchDigest(VoucherClaim[] voucherClaims) external view returns (bytes32);

        /// A channel was opened, or an empty one filled again.
        event ChannelCreated(bytes32 indexed channelId, ChannelConfig config);
        /// A channel is empty, and nothing was ever claimed.
        event ChannelClosed(bytes32 indexed channelId, ChannelConfig config);
        /// A deposit arrived.
        event Deposited(bytes32 indexed channelId, address indexed sender, uint128 amount, uint128 newBalance);
        /// Something was claimed.
        event Claimed(bytes32 indexed channelId, address indexed sender, uint128 claimAmount, uint128 newTotalClaimed);
        /// What was claimed was transferred.
        event Settled(address indexed receiver, address indexed token, address indexed sender, uint128 amount);
        /// The payer was refunded.
        event Refunded(bytes32 indexed channelId, address indexed sender, uint128 amount);
        /// A withdrawal was announced.
        event WithdrawInitiated(bytes32 indexed channelId, uint128 amount, uint40 finalizeAfter);
        /// The payer withdrew.
        event WithdrawFinalized(bytes32 indexed channelId, address indexed sender, uint128 amount);

        /// An address is zero, or the caller is not the channel's payer.
        error InvalidChannel();
        /// A deposit of nothing.
        error ZeroDeposit();
        /// More than 128 bits.
        error DepositOverflow();
        /// A signature is not the one that is needed.
        error InvalidSignature();
        /// A row's authorizer is not the one that signed.
        error NotReceiverAuthorizer();
        /// The caller may not claim for this channel.
        error NotAuthorizedToClaim();
        /// The caller may not refund this channel.
        error NotAuthorizedToRefund();
        /// A claim above what the payer signed.
        error ClaimExceedsCeiling();
        /// A claim above what is in the channel.
        error ClaimExceedsBalance();
        /// A withdrawal was announced before.
        error WithdrawalAlreadyPending();
        /// No withdrawal was announced.
        error WithdrawalNotPending();
        /// The caller is not the channel's payer.
        error NotAuthorizedToFinalizeWithdraw();
        /// The delay is not over.
        error WithdrawDelayNotElapsed();
        /// A withdrawal of nothing.
        error NothingToWithdraw();
        /// More than is left.
        error WithdrawAmountExceedsAvailable();
        /// Outside 900..=2,592,000 seconds.
        error WithdrawDelayOutOfRange();
        /// No row.
        error EmptyBatch();
        /// The collector did not deliver exactly the amount.
        error DepositCollectionFailed();
        /// No collector.
        error InvalidCollector();
        /// The nonce of another refund.
        error InvalidRefundNonce();
        /// A refund of nothing.
        error ZeroRefund();
    }
}

impl From<&super::ChannelConfig> for ChannelConfig {
    fn from(config: &super::ChannelConfig) -> Self {
        Self {
            payer: config.payer,
            payerAuthorizer: config.payer_authorizer,
            receiver: config.receiver,
            receiverAuthorizer: config.receiver_authorizer,
            token: config.token,
            withdrawDelay: U40::from(config.withdraw_delay),
            salt: config.salt,
        }
    }
}
