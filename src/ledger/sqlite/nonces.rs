//! Transactions on disk.

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};
use sqlx::{Row as _, SqliteConnection};

use super::{
    super::{LedgerError, MemoryLedger, PaymentKey, Sender, Submission},
    journal::{backend, unreadable},
};
use crate::network::Network;

/// Which payment, on the sender's chain.
#[derive(Serialize, Deserialize)]
struct Member(Address, Address, B256);

/// Writes a nonce as memory has it now.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    memory: &MemoryLedger,
    sender: Sender,
    number: u64,
) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM transactions WHERE chain_id = ?1 AND sender = ?2 AND nonce = ?3")
        .bind(sender.network.chain_id().cast_signed())
        .bind(sender.address.to_vec())
        .bind(number.cast_signed())
        .execute(&mut *connection)
        .await?;
    let Some(nonce) = memory.nonce(&sender, number) else { return Ok(()) };
    for submission in &nonce.transactions {
        let members: Vec<Member> =
            submission.payments.iter().map(|key| Member(key.asset, key.payer, key.nonce)).collect();
        let members = serde_json::to_string(&members).map_err(|error| sqlx::Error::Encode(error.into()))?;
        sqlx::query(
            "INSERT INTO transactions (chain_id, sender, nonce, hash, raw, payments, is_free, submitted_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )
        .bind(sender.network.chain_id().cast_signed())
        .bind(sender.address.to_vec())
        .bind(number.cast_signed())
        .bind(submission.hash.to_vec())
        .bind(&submission.raw[..])
        .bind(members)
        .bind(nonce.is_free)
        .bind(submission.at.cast_signed())
        .execute(&mut *connection)
        .await?;
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
