//! The state as of a block, as executions read it.

use std::{collections::HashMap, convert::Infallible};

use alloy_primitives::{Address, B256, Bytes, U256, keccak256};
use revm::{Database, bytecode::Bytecode, state::AccountInfo};

use super::{
    block::Block,
    state::{State, replace_code},
};

/// The state after a past block: the newest state without the changes of later blocks.
pub(super) struct View<'a> {
    state: &'a State,
    blocks: &'a [Block],
    accounts: HashMap<Address, &'a Option<AccountInfo>>,
    slots: HashMap<(Address, U256), U256>,
    /// Accounts as a call wants to see them.
    overrides: HashMap<Address, AccountInfo>,
}

impl<'a> View<'a> {
    /// Creates a view of the state after block `number`. `state` is that after the last of `blocks`.
    pub(super) fn new(state: &'a State, blocks: &'a [Block], number: u64) -> Self {
        let (mut accounts, mut slots) = (HashMap::new(), HashMap::new());
        // From the newest block down, so that older values replace newer ones.
        for block in blocks.iter().rev().take_while(|block| block.header.number > number) {
            accounts.extend(block.undo.accounts.iter().map(|(address, info)| (*address, info)));
            slots.extend(&block.undo.slots);
        }
        Self { state, blocks, accounts, slots, overrides: HashMap::new() }
    }

    /// Shows this code at an address.
    pub(super) fn override_code(&mut self, address: Address, code: Bytes) {
        let mut info = self.account(address).unwrap_or_default();
        replace_code(&mut info, code);
        self.overrides.insert(address, info);
    }

    pub(super) fn account(&self, address: Address) -> Option<AccountInfo> {
        if let Some(info) = self.overrides.get(&address) {
            return Some(info.clone());
        }
        match self.accounts.get(&address) {
            Some(past) => (*past).clone(),
            None => self.state.accounts.get(&address).cloned(),
        }
    }

    pub(super) fn slot(&self, address: Address, key: U256) -> U256 {
        let key = (address, key);
        self.slots.get(&key).or_else(|| self.state.slots.get(&key)).copied().unwrap_or_default()
    }
}

impl Database for View<'_> {
    type Error = Infallible;

    fn basic(&mut self, address: Address) -> Result<Option<AccountInfo>, Infallible> {
        Ok(self.account(address))
    }

    /// Called for accounts without code only, since the others have theirs.
    fn code_by_hash(&mut self, code_hash: B256) -> Result<Bytecode, Infallible> {
        debug_assert_eq!(code_hash, keccak256([]));
        Ok(Bytecode::default())
    }

    fn storage(&mut self, address: Address, key: U256) -> Result<U256, Infallible> {
        Ok(self.slot(address, key))
    }

    fn block_hash(&mut self, number: u64) -> Result<B256, Infallible> {
        let block = usize::try_from(number).ok().and_then(|index| self.blocks.get(index));
        Ok(block.map(|block| block.header.hash).unwrap_or_default())
    }
}
