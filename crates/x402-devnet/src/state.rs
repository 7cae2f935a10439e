//! Accounts and storage, with an undo record per block, so that past states can be read and blocks can be replaced.

use std::{collections::HashMap, convert::Infallible};

use alloy_primitives::{Address, B256, Bytes, U256, keccak256};
use revm::{
    Database,
    bytecode::Bytecode,
    state::{AccountInfo, EvmState},
};

use super::chain::Block;

/// Accounts and storage after the newest block.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) accounts: HashMap<Address, AccountInfo>,
    pub(super) slots: HashMap<(Address, U256), U256>,
}

/// The previous values of accounts and slots that a block changed. `None` is an account that did not exist.
#[derive(Debug, Default)]
pub(super) struct Undo {
    pub(super) accounts: HashMap<Address, Option<AccountInfo>>,
    pub(super) slots: HashMap<(Address, U256), U256>,
}

impl State {
    pub(super) fn account(&self, address: Address) -> AccountInfo {
        self.accounts.get(&address).cloned().unwrap_or_default()
    }

    /// Changes an account outside any block.
    pub(super) fn edit(&mut self, address: Address, change: impl FnOnce(&mut AccountInfo)) {
        change(self.accounts.entry(address).or_default());
    }

    /// Replaces an account's code outside any block.
    pub(super) fn set_code(&mut self, address: Address, code: Bytes) {
        self.edit(address, |info| replace_code(info, code));
    }

    /// Applies the changes of a transaction, and adds the previous values to `undo`.
    ///
    /// A destroyed account has no slots here: since Cancun, only an account created in the same transaction can be destroyed.
    pub(super) fn commit(&mut self, changes: EvmState, undo: &mut Undo) {
        for (address, account) in changes.into_iter().filter(|(_, account)| account.is_touched()) {
            let before = self.accounts.get(&address).cloned();
            let code = before.as_ref().and_then(|info| info.code.clone());
            undo.accounts.entry(address).or_insert(before);
            if account.is_selfdestructed() || account.is_empty() {
                self.accounts.remove(&address);
                continue;
            }
            let mut info = account.info;
            info.code = info.code.or(code);
            self.accounts.insert(address, info);
            for (key, slot) in account.storage.into_iter().filter(|(_, slot)| slot.is_changed()) {
                let before = self.slots.insert((address, key), slot.present_value());
                undo.slots.entry((address, key)).or_insert(before.unwrap_or_default());
            }
        }
    }

    /// Removes the changes of the newest block.
    pub(super) fn revert(&mut self, undo: Undo) {
        for (address, before) in undo.accounts {
            match before {
                Some(info) => self.accounts.insert(address, info),
                None => self.accounts.remove(&address),
            };
        }
        self.slots.extend(undo.slots);
    }
}

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

fn replace_code(info: &mut AccountInfo, code: Bytes) {
    let code = Bytecode::new_raw_checked(code.clone()).unwrap_or_else(|_| Bytecode::new_legacy(code));
    info.code_hash = code.hash_slow();
    info.code = Some(code);
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
