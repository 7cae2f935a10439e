//! Payments by their state.

use super::{
    super::{Counts, LedgerError, Listing, Record, SettlementState},
    connections::{Connections, Statement},
    payments::{capped, chain, column, fulfilment, stamped},
};

/// Every state's rows are an index apart, each in the order of the keys.
const LIST: &str = "SELECT found.* FROM unnest($1::text[]) AS state CROSS JOIN LATERAL (\
       SELECT * FROM payments WHERE settlement = state \
         AND (chain_id, asset, payer, nonce) > ($2, $3::bytea, $4::bytea, $5::bytea) \
         AND ($6::bigint IS NULL OR chain_id = $6) \
         AND (cardinality($7::text[]) = 0 OR fulfilment = ANY ($7)) \
         AND ($8::bigint IS NULL OR (settling_until < $8) IS NOT FALSE AND (lease_until < $8 OR settled_at IS NOT NULL)) \
         AND ($9::bigint IS NULL OR block <= $9) \
       ORDER BY chain_id, asset, payer, nonce LIMIT $10) AS found \
     ORDER BY chain_id, asset, payer, nonce LIMIT $10";
const COUNTS: &str = "SELECT settlement, fulfilment = 'released' AS is_released, has_failed, count(*) AS number \
       FROM payments GROUP BY 1, 2, 3 \
     UNION ALL SELECT 'settled', false, false, settled FROM totals";

/// How many rows are read at once.
const PAGE: usize = 512;
const STATES: [SettlementState; 7] = [
    SettlementState::None,
    SettlementState::Due,
    SettlementState::Submitted,
    SettlementState::Unknown,
    SettlementState::Settled,
    SettlementState::Final,
    SettlementState::Dead,
];

pub(super) async fn list(connections: &Connections, listing: &Listing) -> Result<Vec<Record>, LedgerError> {
    let mut after = listing.after;
    let mut found = Vec::new();
    loop {
        let page = PAGE.min(listing.limit - found.len());
        let rows = connections.repeat(page_of(listing, after, page)).await?;
        for row in &rows {
            let record = stamped(row)?.record;
            after = Some(record.key);
            // The database picks with indexes; what belongs on the list is said in one place.
            if listing.holds(&record) {
                found.push(record);
            }
        }
        if rows.len() < page || found.len() >= listing.limit {
            return Ok(found);
        }
    }
}

fn page_of(listing: &Listing, after: Option<crate::payment::PaymentKey>, page: usize) -> Statement {
    let states: Vec<&str> = STATES
        .iter()
        .filter(|state| listing.settlement.is_empty() || listing.settlement.contains(state))
        .map(|state| state.as_str())
        .collect();
    let bytes = |part: Option<&[u8]>| part.unwrap_or_default().to_vec();
    Statement::new(LIST)
        .bind(states)
        .bind(after.map_or(i64::MIN, |key| chain(key.network)))
        .bind(bytes(after.as_ref().map(|key| key.asset.as_slice())))
        .bind(bytes(after.as_ref().map(|key| key.payer.as_slice())))
        .bind(bytes(after.as_ref().map(|key| key.nonce.as_slice())))
        .bind(listing.network.map(chain))
        .bind(listing.fulfilment.iter().map(|state| fulfilment(*state)).collect::<Vec<_>>())
        .bind(listing.idle_at.map(capped))
        .bind(listing.up_to_block.map(capped))
        .bind(i64::try_from(page).unwrap_or(i64::MAX))
}

pub(super) async fn counts(connections: &Connections) -> Result<Counts, LedgerError> {
    let mut counts = Counts::default();
    for row in connections.repeat(Statement::new(COUNTS)).await? {
        let name: &str = column(&row, "settlement")?;
        let state = STATES.into_iter().find(|state| state.as_str() == name).ok_or_else(super::payments::unreadable)?;
        let counter = counts.counter(state, column(&row, "is_released")?, column(&row, "has_failed")?);
        if let Some(counter) = counter {
            *counter += column::<i64>(&row, "number")?.cast_unsigned();
        }
    }
    Ok(counts)
}
