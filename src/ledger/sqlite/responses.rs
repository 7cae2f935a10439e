//! Responses on disk.

use alloy_primitives::{Address, B256};
use rusqlite::{Connection, Row};

use super::{
    super::{LedgerError, StoredResponse, row::Head},
    file::{backend, unreadable, unwritable},
};
use crate::{network::Network, payment::PaymentKey};

/// Makes the file hold a response in the row of this number.
pub(super) fn write(
    connection: &Connection,
    number: i64,
    key: &PaymentKey,
    response: &StoredResponse,
) -> Result<(), rusqlite::Error> {
    let head = serde_json::to_string(&Head::of(response)).map_err(unwritable)?;
    let PaymentKey { network, asset, payer, nonce } = key;
    let upsert = "INSERT INTO responses (id, chain_id, asset, payer, nonce, stored_at, head, body) \
        VALUES (?, ?, ?, ?, ?, ?, ?, ?) \
        ON CONFLICT (id) DO UPDATE SET stored_at = excluded.stored_at, head = excluded.head, body = excluded.body";
    let values = (
        number,
        network.chain_id().cast_signed(),
        asset.as_slice(),
        payer.as_slice(),
        nonce.as_slice(),
        response.stored_at.cast_signed(),
        head,
        &response.body[..],
    );
    connection.prepare_cached(upsert)?.execute(values).map(drop)
}

/// Gives all responses to `keep`, the oldest first, and returns what it returns: what is not kept any more.
pub(super) fn load(
    connection: &Connection,
    mut keep: impl FnMut(i64, PaymentKey, StoredResponse) -> Vec<PaymentKey>,
) -> Result<Vec<PaymentKey>, LedgerError> {
    let select = "SELECT id, chain_id, asset, payer, nonce, stored_at, head, body FROM responses ORDER BY stored_at";
    let mut select = connection.prepare(select).map_err(backend)?;
    let mut rows = select.query([]).map_err(backend)?;
    let mut gone = Vec::new();
    while let Some(row) = rows.next().map_err(backend)? {
        let (key, response) = read(row).map_err(backend)?.ok_or_else(unreadable)?;
        gone.extend(keep(row.get(0).map_err(backend)?, key, response));
    }
    Ok(gone)
}

fn read(row: &Row<'_>) -> Result<Option<(PaymentKey, StoredResponse)>, rusqlite::Error> {
    let bytes = |index| row.get::<_, Vec<u8>>(index);
    let (Ok(asset), Ok(payer), Ok(nonce)) =
        (Address::try_from(&bytes(2)?[..]), Address::try_from(&bytes(3)?[..]), B256::try_from(&bytes(4)?[..]))
    else {
        return Ok(None);
    };
    let network = Network::eip155(row.get::<_, i64>(1)?.cast_unsigned());
    let stored_at = row.get::<_, i64>(5)?.cast_unsigned();
    let head = serde_json::from_str::<Head>(&row.get::<_, String>(6)?).ok();
    let response = head.and_then(|head| head.into_response(bytes(7).ok()?, stored_at));
    Ok(response.map(|response| (PaymentKey { network, asset, payer, nonce }, response)))
}
