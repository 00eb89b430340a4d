//! The holder registry, built from the chain's events: current units, and their history by block.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use events::{MultiRow, Script, Tx};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};

use super::Repo;
use crate::error::Error;
use crate::model::{Holder, InstrumentStatus, MoveStep};

const CURSOR: &str = "registry_block";

static HOLDERS: MultiRow = MultiRow::new(
    "INSERT INTO holding (token, address, units, since_us, block_number, updated_at_us) \
     SELECT * FROM (VALUES ",
    6,
    ") WHERE true LIMIT +? ON CONFLICT (token, address) DO UPDATE SET units = excluded.units, \
     block_number = excluded.block_number, updated_at_us = excluded.updated_at_us",
);

static HISTORY: MultiRow = MultiRow::new(
    "INSERT INTO holding_history (token, address, block_number, time_us, units) \
     SELECT * FROM (VALUES ",
    5,
    ") WHERE true LIMIT +? ON CONFLICT (token, address, block_number) \
     DO UPDATE SET units = excluded.units",
);

/// Supply of a token after its last applied block.
const LAST_SUPPLY: &str =
    "SELECT units FROM supply_history WHERE token = $1 ORDER BY block_number DESC LIMIT 1";

/// Follows every address in the order of texts.
const LAST_ADDRESS: &str = "\u{10FFFF}";

/// Units that an address received in a block; negative if sent. An event may contain any number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderMove {
    pub token: String,
    pub address: String,
    pub units: i128,
    pub block_number: u64,
    pub time_us: i64,
}

/// Moves applied to the holders' units.
#[derive(Debug, Default, PartialEq, Eq)]
struct Folded<'a> {
    /// By token, address and block: units at the block's end, and its time.
    history: BTreeMap<(&'a str, &'a str, u64), (i64, i64)>,
    /// By token and block: supply after a block that changed it, and its time.
    supply: BTreeMap<(&'a str, u64), (i64, i64)>,
    /// Tokens with an impossible move, and the block of the first.
    impossible: BTreeMap<&'a str, u64>,
}

/// The chain's balances of a token as of a block.
pub struct Correction<'a> {
    pub token: &'a str,
    /// Address and units.
    pub units: &'a [(String, i64)],
    pub supply: i64,
    pub block_number: u64,
    pub time_us: i64,
}

/// State of a holder after the last applied block.
#[derive(Debug, PartialEq, Eq)]
struct Latest {
    units: i64,
    /// Time of the first block with a move. A stored holder keeps its earlier time.
    since_us: i64,
    time_us: i64,
    block_number: u64,
}

impl<'a> Folded<'a> {
    /// The state of each holder, by token and address.
    fn latest(&self) -> BTreeMap<(&'a str, &'a str), Latest> {
        let mut latest = BTreeMap::new();
        for ((token, address, block_number), (units, time_us)) in &self.history {
            let holder = latest.entry((*token, *address)).or_insert(Latest {
                units: 0,
                since_us: *time_us,
                time_us: 0,
                block_number: 0,
            });
            (holder.units, holder.time_us) = (*units, *time_us);
            holder.block_number = *block_number;
        }
        latest
    }
}

/// Applies moves in order to the holders' units (`held`, by token and address) and to the supplies
/// (by token). Keeps no move of a token's first impossible block or later.
fn fold<'a>(
    mut held: HashMap<(&'a str, &'a str), i64>,
    mut supplies: HashMap<&'a str, i64>,
    moves: &[&'a HolderMove],
) -> Folded<'a> {
    let mut folded = Folded::default();
    let mut stored = supplies.clone();
    for change in moves {
        let (token, address) = (change.token.as_str(), change.address.as_str());
        if folded.impossible.contains_key(token) {
            continue;
        }
        let units = held.entry((token, address)).or_default();
        let supply = supplies.entry(token).or_default();
        let (Some(after), Some(total)) =
            (units_after(*units, change), units_after(*supply, change))
        else {
            folded.impossible.insert(token, change.block_number);
            continue;
        };
        (*units, *supply) = (after, total);
        let at = (token, address, change.block_number);
        folded.history.insert(at, (after, change.time_us));
        let at = (token, change.block_number);
        folded.supply.insert(at, (total, change.time_us));
    }
    let impossible = &folded.impossible;
    let is_possible =
        |token: &str, block: &u64| impossible.get(token).is_none_or(|first| block < first);
    folded
        .history
        .retain(|(token, _, block), _| is_possible(token, block));
    // Ordered by token and block: a block of transfers alone repeats the supply before it.
    folded.supply.retain(|(token, block), (units, _)| {
        is_possible(token, block) && stored.insert(*token, *units).unwrap_or_default() != *units
    });
    folded
}

/// Units after a move. `None` below zero or beyond 64 bits.
fn units_after(units: i64, change: &HolderMove) -> Option<i64> {
    let after = i128::from(units).checked_add(change.units)?;
    i64::try_from(after).ok().filter(|after| *after >= 0)
}

impl Repo {
    /// The last block applied to the registry.
    pub async fn registry_block(&self) -> Result<Option<u64>, Error> {
        let text = self.setting(CURSOR).await?;
        text.map(|text| text.parse().map_err(|_| super::damaged(CURSOR)))
            .transpose()
    }

    /// Token contracts that the registry follows: of all instruments except drafts, quarantined
    /// ones, and tokens whose holders are being moved. The block, if set, is the first whose events
    /// are not in the registry yet. Activation stores that block, so the events of a draft must not
    /// be applied before: they would count twice.
    pub async fn tokens(&self) -> Result<Vec<(String, Option<u64>)>, Error> {
        let rows: Vec<(String, Option<i64>)> = sqlx::query_as(
            "SELECT contract_address, from_block FROM instrument LEFT JOIN registry_backlog ON token = contract_address
             WHERE contract_address > '' AND status <> $1
               AND contract_address NOT IN (SELECT token FROM registry_quarantine)
               AND NOT EXISTS (SELECT 1 FROM token_move AS m INDEXED BY token_move_open \
                WHERE m.instrument_id = instrument.instrument_id AND m.finished_at_us IS NULL \
                AND m.step > $2)
             ORDER BY contract_address",
        )
        .bind(InstrumentStatus::Draft.code())
        .bind(MoveStep::FixHolders.code())
        .fetch_all(self.db.read())
        .await?;
        let block = |number: i64| number as u64;
        let rows = rows.into_iter();
        Ok(rows
            .map(|(token, from_block)| (token, from_block.map(block)))
            .collect())
    }

    /// Adds a new token whose first event may be in this block.
    pub async fn add_token_in_tx(
        &self,
        tx: &mut Tx,
        token: &str,
        from_block: u64,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO registry_backlog (token, from_block) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        )
        .bind(token)
        .bind(from_block as i64)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Applies moves of a new token and stores the next block of its backlog; `None`: none is left.
    /// Returns all quarantined tokens.
    pub async fn apply_backlog(
        &self,
        token: &str,
        moves: &[HolderMove],
        next_block: Option<u64>,
    ) -> Result<BTreeSet<String>, Error> {
        let mut tx = self.begin().await?;
        let quarantined = self.apply_in_tx(&mut tx, moves).await?;
        match next_block {
            Some(block) => {
                sqlx::query("UPDATE registry_backlog SET from_block = $2 WHERE token = $1")
                    .bind(token)
                    .bind(block as i64)
                    .execute(&mut *tx)
                    .await?
            }
            None => {
                sqlx::query("DELETE FROM registry_backlog WHERE token = $1")
                    .bind(token)
                    .execute(&mut *tx)
                    .await?
            }
        };
        tx.commit().await?;
        Ok(quarantined)
    }

    /// Applies moves in order and stores `through` as the last applied block. Returns all
    /// quarantined tokens.
    pub async fn apply_moves(
        &self,
        moves: &[HolderMove],
        through: u64,
    ) -> Result<BTreeSet<String>, Error> {
        let mut tx = self.begin().await?;
        let quarantined = self.apply_in_tx(&mut tx, moves).await?;
        sqlx::query(
            "INSERT INTO setting (name, value) VALUES ($1, $2) \
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(CURSOR)
        .bind(through.to_string())
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(quarantined)
    }

    /// Applies moves in order. A token with an impossible move is quarantined: its moves of that
    /// block and of later blocks are not applied. Returns all quarantined tokens.
    async fn apply_in_tx(
        &self,
        tx: &mut Tx,
        moves: &[HolderMove],
    ) -> Result<BTreeSet<String>, Error> {
        let known: Vec<String> = sqlx::query_scalar("SELECT token FROM registry_quarantine")
            .fetch_all(&mut **tx)
            .await?;
        let mut quarantined: BTreeSet<String> = known.into_iter().collect();
        let moves: Vec<&HolderMove> = moves
            .iter()
            .filter(|change| !quarantined.contains(&change.token))
            .collect();
        let stored = self.held_in_tx(tx, &moves).await?;
        let mut held = HashMap::new();
        for change in &moves {
            let holder = (change.token.as_str(), change.address.as_str());
            held.entry(holder).or_insert_with(|| {
                let of_holder = (change.token.clone(), change.address.clone());
                stored.get(&of_holder).copied().unwrap_or_default()
            });
        }
        let mut supplies = HashMap::new();
        for change in &moves {
            if let Entry::Vacant(unread) = supplies.entry(change.token.as_str()) {
                let units: Option<i64> = sqlx::query_scalar(LAST_SUPPLY)
                    .bind(&change.token)
                    .fetch_optional(&mut **tx)
                    .await?;
                unread.insert(units.unwrap_or_default());
            }
        }
        let folded = fold(held, supplies, &moves);
        self.save_in_tx(tx, &folded).await?;
        for (token, block) in &folded.impossible {
            tracing::error!(
                token,
                block,
                severity = "critical",
                "impossible transfer: the token is quarantined"
            );
            sqlx::query("INSERT INTO registry_quarantine (token, block_number) VALUES ($1, $2)")
                .bind(token)
                .bind(*block as i64)
                .execute(&mut **tx)
                .await?;
            quarantined.insert((*token).to_owned());
        }
        Ok(quarantined)
    }

    /// Units of the holders that these moves name, by token and address.
    async fn held_in_tx(
        &self,
        tx: &mut Tx,
        moves: &[&HolderMove],
    ) -> Result<HashMap<(String, String), i64>, Error> {
        let named = moves
            .iter()
            .map(|of| [of.token.as_str(), of.address.as_str()]);
        let named: BTreeSet<[&str; 2]> = named.collect();
        // The outer loop is over the names: each is a search by the primary key.
        let rows: Vec<(String, String, i64)> = sqlx::query_as(
            "SELECT token, address, units FROM json_each($1) AS v CROSS JOIN holding \
             ON token = json_extract(v.value, '$[0]') AND address = json_extract(v.value, '$[1]')",
        )
        .bind(serde_json::json!(named).to_string())
        .fetch_all(&mut **tx)
        .await?;
        let rows = rows.into_iter();
        Ok(rows
            .map(|(token, address, units)| ((token, address), units))
            .collect())
    }

    /// Stores the applied moves: the holders' units, their history and that of the supplies.
    async fn save_in_tx(&self, tx: &mut Tx, folded: &Folded<'_>) -> Result<(), Error> {
        let mut script = Script::default();
        let latest: Vec<_> = folded.latest().into_iter().collect();
        script
            .add(
                tx,
                &HOLDERS,
                &latest,
                |((token, address), latest), values| {
                    values.put((*token).to_owned());
                    values.put((*address).to_owned());
                    values.put(latest.units);
                    values.put(latest.since_us);
                    values.put(latest.block_number as i64);
                    values.put(latest.time_us);
                },
            )
            .await?;
        let history: Vec<_> = folded.history.iter().collect();
        script
            .add(
                tx,
                &HISTORY,
                &history,
                |((token, address, block), (units, time_us)), values| {
                    values.put((*token).to_owned());
                    values.put((*address).to_owned());
                    values.put(*block as i64);
                    values.put(*time_us);
                    values.put(*units);
                },
            )
            .await?;
        script.run(tx).await?;
        for ((token, block), (units, time_us)) in &folded.supply {
            sqlx::query(
                "INSERT INTO supply_history (token, block_number, time_us, units) \
                 VALUES ($1, $2, $3, $4)
                 ON CONFLICT (token, block_number) DO UPDATE SET units = excluded.units",
            )
            .bind(token)
            .bind(*block as i64)
            .bind(time_us)
            .bind(units)
            .execute(&mut **tx)
            .await?;
        }
        Ok(())
    }

    /// Instruments of quarantined tokens, with the block of the impossible event.
    pub async fn quarantined(&self) -> Result<Vec<(String, InstrumentStatus, u64)>, Error> {
        let rows: Vec<(String, i32, i64)> = sqlx::query_as(
            "SELECT instrument_id, status, block_number FROM registry_quarantine \
             CROSS JOIN instrument ON contract_address = token ORDER BY instrument_id",
        )
        .fetch_all(self.db.read())
        .await?;
        let rows = rows.into_iter().map(|(instrument_id, status, block)| {
            let status = InstrumentStatus::from_code(status);
            Ok((
                instrument_id,
                status.ok_or_else(|| super::damaged("status"))?,
                block as u64,
            ))
        });
        rows.collect()
    }

    /// Block of the impossible event of a quarantined token.
    pub async fn quarantined_since(&self, token: &str) -> Result<Option<u64>, Error> {
        let block: Option<i64> =
            sqlx::query_scalar("SELECT block_number FROM registry_quarantine WHERE token = $1")
                .bind(token)
                .fetch_optional(self.db.read())
                .await?;
        Ok(block.map(|block| block as u64))
    }

    /// All addresses that had units of a token.
    pub async fn addresses_of(&self, token: &str) -> Result<BTreeSet<String>, Error> {
        let found: Vec<String> = sqlx::query_scalar("SELECT address FROM holding WHERE token = $1")
            .bind(token)
            .fetch_all(self.db.read())
            .await?;
        Ok(found.into_iter().collect())
    }

    /// Sets a quarantined token's holders and supply to the chain's balances as of a block, and
    /// ends its quarantine.
    pub async fn correct_token_in_tx(
        &self,
        tx: &mut Tx,
        correction: &Correction<'_>,
    ) -> Result<(), Error> {
        let (token, at) = (correction.token, correction.block_number);
        let known: Vec<(String, i64)> =
            sqlx::query_as("SELECT address, units FROM holding WHERE token = $1")
                .bind(token)
                .fetch_all(&mut **tx)
                .await?;
        let known: HashMap<String, i64> = known.into_iter().collect();
        let mut folded = Folded::default();
        for (address, units) in correction.units {
            if known.get(address).copied().unwrap_or_default() != *units {
                let row = (*units, correction.time_us);
                folded.history.insert((token, address.as_str(), at), row);
            }
        }
        let last: Option<i64> = sqlx::query_scalar(LAST_SUPPLY)
            .bind(token)
            .fetch_optional(&mut **tx)
            .await?;
        if last.unwrap_or_default() != correction.supply {
            let row = (correction.supply, correction.time_us);
            folded.supply.insert((token, at), row);
        }
        self.save_in_tx(tx, &folded).await?;
        sqlx::query("DELETE FROM registry_quarantine WHERE token = $1")
            .bind(token)
            .execute(&mut **tx)
            .await?;
        // A token that was quarantined while its backlog was read.
        sqlx::query("DELETE FROM registry_backlog WHERE token = $1")
            .bind(token)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    pub async fn is_quarantined(&self, token: &str) -> Result<bool, Error> {
        let found: Option<i64> =
            sqlx::query_scalar("SELECT 1 FROM registry_quarantine WHERE token = $1")
                .bind(token)
                .fetch_optional(self.db.read())
                .await?;
        Ok(found.is_some())
    }

    /// Supply in the registry: the sum of all holders' units, now or after the last block sealed at
    /// or before `at_us`. One row, however many holders there are.
    pub async fn registry_supply(&self, token: &str, at_us: Option<i64>) -> Result<i64, Error> {
        let units: Option<i64> = match at_us {
            None => {
                let query = sqlx::query_scalar(LAST_SUPPLY).bind(token);
                query.fetch_optional(self.db.read()).await?
            }
            Some(at_us) => {
                sqlx::query_scalar(
                    "SELECT units FROM supply_history WHERE token = $1 AND time_us <= $2 \
                     ORDER BY time_us DESC, block_number DESC LIMIT 1",
                )
                .bind(token)
                .bind(at_us)
                .fetch_optional(self.db.read())
                .await?
            }
        };
        Ok(units.unwrap_or_default())
    }

    /// Current units of addresses; those without units may be missing.
    pub async fn units_of(
        &self,
        token: &str,
        addresses: &[&str],
    ) -> Result<HashMap<String, i64>, Error> {
        if addresses.is_empty() {
            return Ok(HashMap::new());
        }
        let mut query =
            QueryBuilder::<sqlx::Sqlite>::new("SELECT address, units FROM holding WHERE token = ");
        query.push_bind(token).push(" AND address IN (");
        let mut listed = query.separated(", ");
        for address in addresses {
            listed.push_bind(*address);
        }
        query.push(")");
        let rows: Vec<(String, i64)> = query.build_query_as().fetch_all(self.db.read()).await?;
        Ok(rows.into_iter().collect())
    }

    /// Current holders with units, newest first, strictly after the bound.
    pub async fn holders(
        &self,
        token: &str,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Holder>, Error> {
        let rows = sqlx::query(
            "SELECT holding.*, user_id FROM holding LEFT JOIN user_address USING (address)
             WHERE token = $1 AND units <> 0 AND (since_us, address) < ($2, $3) \
             ORDER BY since_us DESC, address DESC LIMIT $4",
        )
        .bind(token)
        .bind(bound.0)
        .bind(bound.1)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.iter().map(decode).collect())
    }

    /// Holders with units after the last block sealed at or before `at_us`, newest first, strictly
    /// after the bound. Cost: the page, and the holders between its rows that had no units then.
    pub async fn holders_at(
        &self,
        token: &str,
        at_us: i64,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Holder>, Error> {
        // Later holders had no units at that time.
        let bound = if bound.0 > at_us {
            (at_us, LAST_ADDRESS)
        } else {
            bound
        };
        let rows = sqlx::query(
            "SELECT h.token, h.address, h.units, h.block_number, h.time_us AS updated_at_us, holding.since_us, user_id
             FROM holding INDEXED BY holding_since
             CROSS JOIN holding_history h ON h.token = holding.token AND h.address = holding.address \
               AND h.block_number = (SELECT p.block_number FROM holding_history p \
                WHERE p.token = holding.token AND p.address = holding.address AND p.time_us <= $4 \
                ORDER BY p.time_us DESC, p.block_number DESC LIMIT 1)
             LEFT JOIN user_address ON user_address.address = holding.address
             WHERE holding.token = $1 AND (holding.since_us, holding.address) < ($2, $3) AND h.units <> 0
             ORDER BY holding.since_us DESC, holding.address DESC LIMIT $5",
        )
        .bind(token)
        .bind(bound.0)
        .bind(bound.1)
        .bind(at_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.iter().map(decode).collect())
    }
}

fn decode(row: &SqliteRow) -> Holder {
    Holder {
        user_id: row.get::<Option<String>, _>("user_id").unwrap_or_default(),
        address: row.get("address"),
        units_minor: row.get("units"),
        since_us: row.get("since_us"),
        as_of_block: row.get::<i64, _>("block_number") as u64,
        updated_at_us: row.get("updated_at_us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(token: &str, address: &str, units: i128, block_number: u64) -> HolderMove {
        HolderMove {
            token: token.into(),
            address: address.into(),
            units,
            block_number,
            time_us: 10 * block_number as i64,
        }
    }

    #[test]
    fn an_impossible_move_ends_the_moves_of_its_token_alone() {
        for impossible in [-3, i128::from(i64::MAX) + 1, i128::MAX, i128::MIN] {
            let moves = [
                moved("a", "anna", -1, 7),
                moved("a", "boris", 1, 7),
                moved("a", "boris", 1, 8),
                moved("b", "anna", 5, 8),
                moved("a", "anna", impossible, 8),
                moved("b", "anna", -5, 9),
                moved("a", "boris", 1, 9),
            ];
            let held = HashMap::from([(("a", "anna"), 3), (("a", "boris"), 0)]);
            let folded = fold(held, HashMap::from([("a", 3)]), &moves.each_ref());
            let history = [
                (("a", "anna", 7), (2, 70)),
                (("a", "boris", 7), (1, 70)),
                (("b", "anna", 8), (5, 80)),
                (("b", "anna", 9), (0, 90)),
            ];
            assert_eq!(folded.history, BTreeMap::from(history), "{impossible}");
            assert_eq!(folded.impossible, BTreeMap::from([("a", 8)]));
            // Only blocks that changed the supply.
            let supply = [(("b", 8), (5, 80)), (("b", 9), (0, 90))];
            assert_eq!(folded.supply, BTreeMap::from(supply), "{impossible}");
            let latest = [
                (("a", "anna"), (2, 70, 70, 7)),
                (("a", "boris"), (1, 70, 70, 7)),
                (("b", "anna"), (0, 80, 90, 9)),
            ];
            let latest = latest.map(|(holder, (units, since_us, time_us, block_number))| {
                let latest = Latest {
                    units,
                    since_us,
                    time_us,
                    block_number,
                };
                (holder, latest)
            });
            assert_eq!(folded.latest(), BTreeMap::from(latest));
        }
    }

    #[test]
    fn a_supply_beyond_64_bits_is_impossible_for_any_number_of_holders() {
        let moves = [
            moved("a", "anna", i128::from(i64::MAX), 7),
            moved("a", "boris", 1, 8),
            moved("a", "anna", -5, 9),
        ];
        let folded = fold(HashMap::new(), HashMap::new(), &moves.each_ref());
        assert_eq!(folded.impossible, BTreeMap::from([("a", 8)]));
        let supply = [(("a", 7), (i64::MAX, 70))];
        assert_eq!(folded.supply, BTreeMap::from(supply));
    }
}
