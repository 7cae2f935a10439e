//! Transactions on disk.

use std::collections::BTreeMap;

use alloy_primitives::{Address, B256};
use rusqlite::{Connection, Row};
use serde::{Deserialize, Serialize};

use super::{
    super::{LedgerError, MemoryLedger, Sender, Submission, submission::Nonce},
    file::{backend, unreadable, unwritable},
};
use crate::{network::Network, payment::PaymentKey};

/// Which payment, on the sender's chain.
#[derive(Serialize, Deserialize)]
struct Member(Address, Address, B256);

/// Makes the file hold a nonce as it is now.
pub(super) fn write(
    connection: &Connection,
    sender: Sender,
    number: u64,
    nonce: Option<Nonce>,
) -> Result<(), rusqlite::Error> {
    let (chain_id, address) = (sender.network.chain_id().cast_signed(), sender.address.as_slice());
    let delete = "DELETE FROM transactions WHERE chain_id = ? AND sender = ? AND nonce = ?";
    connection.prepare_cached(delete)?.execute((chain_id, address, number.cast_signed()))?;
    let Some(nonce) = nonce else { return Ok(()) };
    for submission in &nonce.transactions {
        let members: Vec<Member> =
            submission.payments.iter().map(|key| Member(key.asset, key.payer, key.nonce)).collect();
        let insert = "INSERT INTO transactions (chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
        let values = (
            chain_id,
            address,
            number.cast_signed(),
            submission.hash.as_slice(),
            &submission.raw[..],
            serde_json::to_string(&members).map_err(unwritable)?,
            nonce.is_free,
            submission.at.cast_signed(),
        );
        connection.prepare_cached(insert)?.execute(values)?;
    }
    Ok(())
}

/// Brings all nonces into memory.
pub(super) fn load(connection: &Connection, memory: &MemoryLedger) -> Result<(), LedgerError> {
    let select = "SELECT chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at FROM transactions \
         ORDER BY chain_id, sender, nonce, submitted_at, rowid";
    let mut select = connection.prepare(select).map_err(backend)?;
    let mut rows = select.query([]).map_err(backend)?;
    while let Some(row) = rows.next().map_err(backend)? {
        let (submission, is_free) = read(row).map_err(backend)?.ok_or_else(unreadable)?;
        memory.restore_submission(submission, is_free);
    }
    Ok(())
}

/// A transaction, and whether its nonce is free.
fn read(row: &Row<'_>) -> Result<Option<(Submission, bool)>, rusqlite::Error> {
    let network = Network::eip155(row.get::<_, i64>(0)?.cast_unsigned());
    let (Ok(address), Ok(hash)) =
        (Address::try_from(&row.get::<_, Vec<u8>>(1)?[..]), B256::try_from(&row.get::<_, Vec<u8>>(3)?[..]))
    else {
        return Ok(None);
    };
    let Ok(members) = serde_json::from_str::<Vec<Member>>(&row.get::<_, String>(5)?) else { return Ok(None) };
    let submission = Submission {
        sender: Sender { network, address },
        nonce: row.get::<_, i64>(2)?.cast_unsigned(),
        hash,
        raw: row.get::<_, Vec<u8>>(4)?.into(),
        payments: members
            .into_iter()
            .map(|Member(asset, payer, nonce)| PaymentKey { network, asset, payer, nonce })
            .collect(),
        by: 0,
        at: row.get::<_, i64>(7)?.cast_unsigned(),
        until: 0,
        known_failures: BTreeMap::new(),
    };
    Ok(Some((submission, row.get(6)?)))
}
