//! Paging of lists (D04, R010). A page has 50 rows by default and at most 1000; a larger size is
//! reduced, a negative one refused. The order is (created descending, id descending). The token is
//! opaque and bound to the filters of its call.
//!
//! A list reads [`Page::rows_limit`] rows strictly after [`Page::after`] from its store and passes
//! them to [`Page::finish`], which cuts the surplus row and creates the token from the last row
//! kept. No row is repeated or skipped as long as older rows do not change.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use proto::common::v1::{PaginationRequest, PaginationResponse};
use tonic::Status;

use crate::status;

pub const SIZE_DEFAULT: u32 = 50;
pub const SIZE_MAX: u32 = 1000;

const TOKEN_VERSION: u8 = 1;
const TOKEN_ID_OFFSET: usize = 17;

/// Position of a row in its list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    pub created_us: i64,
    pub id: String,
}

/// One page to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Maximum rows of the page, 1..=1000.
    pub size: u32,
    /// Fetch rows strictly after this one: `(created, id) < (after.created_us, after.id)`.
    pub after: Option<Key>,
    filter_hash: u64,
}

/// Reads a page request. `filter_hash` is [`filter_hash`] over the filters of the call.
/// INVALID_ARGUMENT for a negative size, a malformed token, or a token of other filters.
pub fn parse(request: Option<PaginationRequest>, filter_hash: u64) -> Result<Page, Status> {
    let request = request.unwrap_or_default();
    let size = match request.page_size {
        ..0 => {
            return Err(status::invalid_argument(
                "pagination.page_size",
                "must not be negative",
            ));
        }
        0 => SIZE_DEFAULT,
        given => given.unsigned_abs().min(SIZE_MAX),
    };
    let after = if request.page_token.is_empty() {
        None
    } else {
        let bad = |why| status::invalid_argument("pagination.page_token", why);
        let (hash, key) =
            decode(&request.page_token).ok_or_else(|| bad("is not a token of this service"))?;
        if hash != filter_hash {
            return Err(bad("was given for other filters"));
        }
        Some(key)
    };
    Ok(Page {
        size,
        after,
        filter_hash,
    })
}

impl Page {
    /// Rows to read from the store: one more than the page, to detect a next page.
    pub fn rows_limit(&self) -> i64 {
        i64::from(self.size) + 1
    }

    /// Exclusive upper bound of the rows, also for the first page: bind both in `WHERE (created_at,
    /// id) < ($1, $2) ORDER BY created_at DESC, id DESC LIMIT $3`.
    pub fn bound(&self) -> (i64, &str) {
        // U+10FFFF sorts after every id in bytewise order.
        self.after
            .as_ref()
            .map_or((i64::MAX, "\u{10FFFF}"), |key| (key.created_us, &key.id))
    }

    /// Cuts the surplus row and creates the response.
    pub fn finish<T>(&self, rows: &mut Vec<T>, key: impl Fn(&T) -> Key) -> PaginationResponse {
        let size = self.size as usize;
        let more = rows.len() > size;
        rows.truncate(size);
        let next_page_token = match rows.last() {
            Some(last) if more => encode(self.filter_hash, &key(last)),
            _ => String::new(),
        };
        PaginationResponse {
            next_page_token,
            total_size: 0,
        }
    }
}

/// Hash of the filters that a token is bound to (FNV-1a, 64 bits). Pass every filter value in a
/// fixed order, empty text for an unset one.
pub fn filter_hash(filters: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for filter in filters {
        for byte in filter.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

fn encode(filter_hash: u64, key: &Key) -> String {
    let mut bytes = Vec::with_capacity(TOKEN_ID_OFFSET + key.id.len());
    bytes.push(TOKEN_VERSION);
    bytes.extend(filter_hash.to_be_bytes());
    bytes.extend(key.created_us.to_be_bytes());
    bytes.extend(key.id.as_bytes());
    URL_SAFE_NO_PAD.encode(bytes)
}

fn decode(token: &str) -> Option<(u64, Key)> {
    let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
    let (&version, rest) = bytes.split_first()?;
    let (hash, rest) = rest.split_first_chunk::<8>()?;
    let (created, id) = rest.split_first_chunk::<8>()?;
    (version == TOKEN_VERSION).then_some(())?;
    let id = std::str::from_utf8(id).ok()?;
    // No row has such an id, and not every store accepts it in a query.
    (!id.chars().any(char::is_control)).then_some(())?;
    Some((
        u64::from_be_bytes(*hash),
        Key {
            created_us: i64::from_be_bytes(*created),
            id: id.to_owned(),
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(page_size: i32, page_token: &str) -> Option<PaginationRequest> {
        Some(PaginationRequest {
            page_size,
            page_token: page_token.into(),
        })
    }

    // rows: R010
    #[test]
    fn r010_sizes_default_coerce_and_refuse() {
        assert_eq!(parse(None, 1).unwrap().size, 50);
        assert_eq!(parse(request(5_000, ""), 1).unwrap().size, 1000);
        assert!(parse(request(-1, ""), 1).is_err());
        assert!(parse(request(2, "garbage!"), 1).is_err());
        assert!(parse(request(2, "AA"), 1).is_err());
    }

    // rows: R010
    #[test]
    fn r010_pages_by_two_give_every_row_once() {
        let rows: Vec<Key> = (0..7_i64)
            .map(|n| Key {
                created_us: 100 - n / 3,
                id: format!("{}", 9 - n),
            })
            .collect();
        let hash = filter_hash(&["user-1", ""]);
        let (mut seen, mut token) = (Vec::new(), String::new());
        loop {
            let page = parse(request(2, &token), hash).unwrap();
            let (created, id) = page.bound();
            let mut fetched: Vec<Key> = rows
                .iter()
                .filter(|row| (row.created_us, row.id.as_str()) < (created, id))
                .take(page.rows_limit() as usize)
                .cloned()
                .collect();
            token = page.finish(&mut fetched, Key::clone).next_page_token;
            seen.extend(fetched);
            if token.is_empty() {
                break;
            }
            assert!(parse(request(2, &token), filter_hash(&["", "user-1"])).is_err());
        }
        assert_eq!(seen, rows);
    }
}
