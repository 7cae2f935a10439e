//! Accounts and storage, with an undo record per block, so that past states can be read and blocks can be replaced.

use std::collections::HashMap;

use alloy_primitives::{Address, Bytes, U256};
use revm::{
    bytecode::Bytecode,
    state::{AccountInfo, EvmState},
};

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

/// Replaces the code of an account. Empty code removes it.
pub(super) fn replace_code(info: &mut AccountInfo, code: Bytes) {
    let code = Bytecode::new_raw_checked(code.clone()).unwrap_or_else(|_| Bytecode::new_legacy(code));
    info.code_hash = code.hash_slow();
    info.code = Some(code);
}
