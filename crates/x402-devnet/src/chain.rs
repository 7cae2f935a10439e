//! The chain: blocks, the pool, and the state at the head.

use std::{collections::HashMap, sync::Arc};

use alloy_consensus::{
    Header, Receipt, ReceiptEnvelope, Signed, TxEnvelope, TxLegacy, TxReceipt as _,
    proofs::{calculate_receipt_root, calculate_transaction_root},
    transaction::{Recovered, SignerRecoverable as _},
};
use alloy_eips::{BlockId, BlockNumberOrTag};
use alloy_primitives::{Address, B256, Bloom, Bytes, Signature, TxKind, U256};
use alloy_rpc_types_eth::TransactionReceipt;
use revm::context::{BlockEnv, TxEnv, result::ExecutionResult};
use tower_x402::Clock;

use super::{
    Orphans, Transaction,
    block::{Block, Mined, rpc_receipt},
    evm::{self, Rules},
    failure::Failure,
    pool::{Pool, Sender},
    state::{State, Undo},
    view::View,
};

/// A chain with all of its blocks. Nothing is pruned.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) chain_id: u64,
    pub(super) state: State,
    pub(super) blocks: Vec<Block>,
    pub(super) pool: Pool,
    pub(super) base_fee: u64,
    /// `true` if calls as of `pending` see what is in the pool.
    pub(super) pending_state: bool,
    finality_depth: u64,
    clock: Arc<dyn Clock>,
    by_hash: HashMap<B256, u64>,
    /// Block number and index of every transaction.
    mined: HashMap<B256, (u64, usize)>,
    /// Makes the blocks of a reorganization differ from those they replace.
    reorgs: u64,
}

/// A block that is being built.
struct Draft {
    env: BlockEnv,
    undo: Undo,
    executed: Vec<(Recovered<Transaction>, bool, ExecutionResult)>,
}

impl Chain {
    pub(super) fn new(chain_id: u64, base_fee: u64, finality_depth: u64, clock: Arc<dyn Clock>) -> Self {
        let genesis = Header {
            timestamp: clock.now(),
            gas_limit: evm::BLOCK_GAS_LIMIT,
            base_fee_per_gas: Some(base_fee),
            ..Header::default()
        };
        let header = alloy_rpc_types_eth::Header::new(genesis);
        Self {
            chain_id,
            state: State::default(),
            by_hash: HashMap::from([(header.hash, 0)]),
            blocks: vec![Block { header, transactions: Vec::new(), undo: Undo::default() }],
            pool: Pool::default(),
            base_fee,
            pending_state: false,
            finality_depth,
            clock,
            mined: HashMap::new(),
            reorgs: 0,
        }
    }

    /// The number of the newest block.
    pub(super) fn head(&self) -> u64 {
        self.blocks.len() as u64 - 1
    }

    pub(super) fn block(&self, number: u64) -> Option<&Block> {
        self.blocks.get(usize::try_from(number).ok()?)
    }

    pub(super) fn block_by_hash(&self, hash: B256) -> Option<&Block> {
        self.block(*self.by_hash.get(&hash)?)
    }

    pub(super) fn mined(&self, hash: B256) -> Option<&Mined> {
        let (number, index) = self.mined.get(&hash)?;
        self.block(*number)?.transactions.get(*index)
    }

    /// Returns the number of the block at a tag, if it exists. `pending` is the newest block.
    pub(super) fn number(&self, tag: BlockNumberOrTag) -> Option<u64> {
        let number = match tag {
            BlockNumberOrTag::Latest | BlockNumberOrTag::Pending => self.head(),
            BlockNumberOrTag::Safe | BlockNumberOrTag::Finalized => self.head().saturating_sub(self.finality_depth),
            BlockNumberOrTag::Earliest => 0,
            BlockNumberOrTag::Number(number) => number,
        };
        (number <= self.head()).then_some(number)
    }

    pub(super) fn resolve(&self, id: BlockId) -> Result<u64, Failure> {
        match id {
            BlockId::Hash(hash) => self.by_hash.get(&hash.block_hash).copied(),
            BlockId::Number(tag) => self.number(tag),
        }
        .ok_or_else(Failure::unknown_block)
    }

    /// The state after block `number`.
    pub(super) fn view(&self, number: u64) -> View<'_> {
        View::new(&self.state, &self.blocks, number)
    }

    /// Returns the state and the block environment of an `eth_call`. The newest block has the current time, so that time passes for calls
    /// even if no block is made.
    pub(super) fn call_context(&self, id: BlockId) -> Result<(View<'_>, BlockEnv), Failure> {
        let number = self.resolve(id)?;
        let block = self.block(number).ok_or_else(Failure::unknown_block)?;
        let (shown, timestamp) = match id {
            BlockId::Number(BlockNumberOrTag::Latest) => (number, self.next_timestamp()),
            BlockId::Number(BlockNumberOrTag::Pending) => (number + 1, self.next_timestamp()),
            _ => (number, block.header.timestamp),
        };
        Ok((self.view(number), evm::block_env(shown, timestamp, self.base_fee)))
    }

    /// Adds a signed transaction to the pool.
    pub(super) fn submit(&mut self, raw: TxEnvelope) -> Result<B256, Failure> {
        let hash = *raw.tx_hash();
        let tx = raw.try_into_recovered().map_err(|_| Failure::rejected("invalid sender"))?;
        let account = self.state.account(tx.signer());
        self.pool.add(tx, &Sender { nonce: account.nonce, balance: account.balance }, self.chain_id)?;
        Ok(hash)
    }

    /// Makes a block of the transactions that can be executed, or an empty one.
    pub(super) fn mine(&mut self) {
        let draft = self.draft_from_pool();
        self.seal(draft);
    }

    /// Makes a block of the transactions that can be executed, if there are any.
    pub(super) fn mine_pending(&mut self) {
        let draft = self.draft_from_pool();
        if !draft.executed.is_empty() {
            self.seal(draft);
        }
    }

    /// Makes a block of one unsigned transaction that pays no fee.
    pub(super) fn execute_as(
        &mut self,
        from: Address,
        to: TxKind,
        input: Bytes,
    ) -> Result<(TransactionReceipt, ExecutionResult), Failure> {
        let nonce = self.state.account(from).nonce;
        let tx = TxLegacy {
            chain_id: Some(self.chain_id),
            nonce,
            gas_limit: evm::CALL_GAS_LIMIT,
            to,
            input,
            ..TxLegacy::default()
        };
        // An invalid signature that depends on the sender, and so makes the transaction hash unique.
        let signature = Signature::new(U256::from_be_slice(from.as_slice()), U256::ONE, false);
        let tx = Recovered::new_unchecked(TxEnvelope::Legacy(Signed::new_unhashed(tx, signature)), from);
        let mut draft = self.draft();
        let result = self.run(&mut draft, evm::tx_env(&tx), Rules::Lenient)?;
        let hash = *tx.tx_hash();
        draft.executed.push((tx, false, result.clone()));
        self.seal(draft);
        let receipt = self.mined(hash).map(|mined| mined.receipt.clone());
        receipt.map(|receipt| (receipt, result)).ok_or_else(|| Failure::internal("the block is gone"))
    }

    /// Executes a call before the first block, without a transaction on the chain.
    pub(super) fn execute_at_genesis(&mut self, from: Address, to: Address, data: Bytes) -> Result<Bytes, Failure> {
        let chain_id = Some(self.chain_id);
        let tx = TxEnv { caller: from, kind: TxKind::Call(to), data, chain_id, ..TxEnv::default() };
        let mut draft = self.draft();
        self.run(&mut draft, tx, Rules::Lenient).and_then(evm::output)
    }

    /// Replaces the newest `depth` blocks by as many others.
    pub(super) fn reorg(&mut self, depth: u64, orphans: Orphans) {
        self.reorgs += 1;
        let depth = depth.min(self.head());
        let kept = self.blocks.len() - depth as usize;
        let undone = self.blocks.split_off(kept);
        for block in undone.into_iter().rev() {
            self.state.revert(block.undo);
            self.by_hash.remove(&block.header.hash);
            for mined in block.transactions {
                self.mined.remove(mined.tx.tx_hash());
                if mined.signed && orphans == Orphans::Requeued {
                    self.pool.put(mined.tx);
                }
            }
        }
        for _ in 0..depth {
            self.mine();
        }
    }

    /// Reads the state after the block that would be made now, and makes none.
    pub(super) fn after_the_pool<T>(&mut self, read: impl FnOnce(&Self) -> T) -> T {
        let pool = self.pool.clone();
        let draft = self.draft_from_pool();
        let answer = read(self);
        self.state.revert(draft.undo);
        self.pool = pool;
        answer
    }

    fn next_timestamp(&self) -> u64 {
        self.blocks.last().map_or(0, |block| block.header.timestamp).max(self.clock.now())
    }

    fn draft(&self) -> Draft {
        let env = evm::block_env(self.head() + 1, self.next_timestamp(), self.base_fee);
        Draft { env, undo: Undo::default(), executed: Vec::new() }
    }

    fn draft_from_pool(&mut self) -> Draft {
        let mut draft = self.draft();
        let mut gas_left = evm::BLOCK_GAS_LIMIT;
        while gas_left >= evm::TX_GAS_LIMIT {
            let Some(tx) = self.pool.take_next(self.base_fee, |sender| self.state.account(sender).nonce) else { break };
            // A transaction without funds is dropped from the pool, as in a node.
            if let Ok(result) = self.run(&mut draft, evm::tx_env(&tx), Rules::Transaction) {
                gas_left = gas_left.saturating_sub(result.tx_gas_used());
                draft.executed.push((tx, true, result));
            }
        }
        draft
    }

    fn run(&mut self, draft: &mut Draft, tx: TxEnv, rules: Rules) -> Result<ExecutionResult, Failure> {
        let outcome = evm::run(self.chain_id, self.view(self.head()), draft.env.clone(), tx, rules)?;
        self.state.commit(outcome.state, &mut draft.undo);
        Ok(outcome.result)
    }

    fn seal(&mut self, draft: Draft) {
        let Draft { env, undo, executed } = draft;
        let mut gas_used = 0;
        let receipts: Vec<ReceiptEnvelope> = executed
            .iter()
            .map(|(tx, _, result)| {
                gas_used += result.tx_gas_used();
                let receipt = Receipt {
                    status: result.is_success().into(),
                    cumulative_gas_used: gas_used,
                    logs: result.logs().to_vec(),
                };
                ReceiptEnvelope::from_typed(tx.tx_type(), receipt.with_bloom())
            })
            .collect();
        let transactions: Vec<_> = executed.iter().map(|(tx, ..)| tx.inner()).collect();
        let header = alloy_rpc_types_eth::Header::new(Header {
            parent_hash: self.blocks.last().map(|block| block.header.hash).unwrap_or_default(),
            beneficiary: env.beneficiary,
            transactions_root: calculate_transaction_root(&transactions),
            receipts_root: calculate_receipt_root(&receipts),
            logs_bloom: receipts.iter().fold(Bloom::ZERO, |bloom, receipt| bloom | receipt.bloom()),
            number: self.head() + 1,
            gas_limit: env.gas_limit,
            gas_used,
            timestamp: env.timestamp.saturating_to(),
            extra_data: self.reorgs.to_be_bytes().into(),
            base_fee_per_gas: Some(env.basefee),
            ..Header::default()
        });
        let mut next_log = 0;
        let transactions: Vec<_> = executed
            .into_iter()
            .zip(receipts)
            .enumerate()
            .map(|(index, ((tx, signed, result), receipt))| {
                let receipt = rpc_receipt(&header, index as u64, &tx, &result, receipt, &mut next_log);
                self.mined.insert(*tx.tx_hash(), (header.number, index));
                Mined { tx, receipt, signed }
            })
            .collect();
        self.by_hash.insert(header.hash, header.number);
        self.blocks.push(Block { header, transactions, undo });
    }
}
