//! Transactions on disk.

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use sqlx::{Arguments as _, Row as _, SqliteConnection, sqlite::SqliteArguments};

use super::{
    super::{LedgerError, MemoryLedger, PaymentKey, Sender, Submission},
    journal::{backend, unreadable},
    rows::Script,
};
use crate::network::Network;

/// Which payment, on the sender's chain.
#[derive(Serialize, Deserialize)]
struct Member(Address, Address, B256);

/// Adds what makes the file hold a nonce as memory has it now.
pub(super) async fn write(
    script: &mut Script,
    connection: &mut SqliteConnection,
    memory: &MemoryLedger,
    sender: Sender,
    number: u64,
) -> Result<(), sqlx::Error> {
    let bind = |values: &mut SqliteArguments| {
        values.add(sender.network.chain_id().cast_signed())?;
        values.add(sender.address.to_vec())?;
        values.add(number.cast_signed())
    };
    let delete = "DELETE FROM transactions WHERE chain_id = ? AND sender = ? AND nonce = ?";
    script.push_with(connection, delete, bind).await?;
    let Some(nonce) = memory.nonce(&sender, number) else { return Ok(()) };
    for submission in &nonce.transactions {
        let members: Vec<Member> =
            submission.payments.iter().map(|key| Member(key.asset, key.payer, key.nonce)).collect();
        let members = serde_json::to_string(&members).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let insert = "INSERT INTO transactions (chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
        let bind = |values: &mut SqliteArguments| {
            bind(values)?;
            values.add(submission.hash.to_vec())?;
            values.add(submission.raw.to_vec())?;
            values.add(members)?;
            values.add(nonce.is_free)?;
            values.add(submission.at.cast_signed())
        };
        script.push_with(connection, insert, bind).await?;
    }
    Ok(())
}

/// Brings all nonces into memory. The process that held them is gone: whoever comes first may go on with them.
pub(super) async fn load(connection: &mut SqliteConnection, memory: &MemoryLedger) -> Result<(), LedgerError> {
    let rows = sqlx::query(
        "SELECT chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at FROM transactions \
         ORDER BY chain_id, sender, nonce, submitted_at, rowid",
    );
    for row in rows.fetch_all(connection).await.map_err(backend)? {
        let (number, is_free, submission) = read(&row).map_err(backend)?.ok_or_else(unreadable)?;
        let mut nonce = memory.nonce(&submission.sender, number).unwrap_or_default();
        (nonce.by, nonce.at, nonce.is_free) = (0, 0, is_free);
        let sender = submission.sender;
        nonce.transactions.push(submission);
        memory.restore_nonce(sender, number, nonce);
    }
    Ok(())
}

fn read(row: &sqlx::sqlite::SqliteRow) -> Result<Option<(u64, bool, Submission)>, sqlx::Error> {
    let network = Network::eip155(row.try_get::<i64, _>(0)?.cast_unsigned());
    let (Ok(address), Ok(hash)) =
        (Address::try_from(&row.try_get::<Vec<u8>, _>(1)?[..]), B256::try_from(&row.try_get::<Vec<u8>, _>(3)?[..]))
    else {
        return Ok(None);
    };
    let Ok(members) = serde_json::from_str::<Vec<Member>>(&row.try_get::<String, _>(5)?) else { return Ok(None) };
    let number = row.try_get::<i64, _>(2)?.cast_unsigned();
    let submission = Submission {
        sender: Sender { network, address },
        nonce: number,
        hash,
        raw: row.try_get::<Vec<u8>, _>(4)?.into(),
        payments: members
            .into_iter()
            .map(|Member(asset, payer, nonce)| PaymentKey { network, asset, payer, nonce })
            .collect(),
        by: 0,
        at: row.try_get::<i64, _>(7)?.cast_unsigned(),
        until: 0,
    };
    Ok(Some((number, row.try_get(6)?, submission)))
}
