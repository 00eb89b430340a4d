//! Payment links of the fast-payment system: the payload of its QR codes.
//!
//! ```text
//! https://qr.nspk.ru/<id>?type=<01|02>&bank=<12 digits>[&sum=<kopecks>&cur=RUB]&crc=<4 hex>
//! ```
//!
//! Type 01 is static (reusable, sum optional), 02 dynamic (single use, sum required). The checksum
//! is CRC-16/CCITT-FALSE over the ASCII text before `&crc=`. It is checked on the received text,
//! because parameter order matters. Any other form is refused: another host, an unknown or repeated
//! parameter, a fiscal receipt.

use std::fmt;

use crate::Rub;

const PREFIX: &str = "https://qr.nspk.ru/";
const ID_LEN: usize = 32;
const BANK_LEN: usize = 12;

/// Static or dynamic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    Static,
    Dynamic,
}

/// A link with well-formed parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SbpLink {
    id: String,
    kind: LinkKind,
    bank: String,
    sum: Option<Rub>,
}

/// Why a text is not a payment link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("is not a link of the fast-payment system")]
    Address,
    #[error("identifier is not 32 upper-case letters and digits")]
    Id,
    #[error("type is neither 01 nor 02")]
    Type,
    #[error("bank is not 12 digits")]
    Bank,
    #[error("sum is not a positive number of kopecks in RUB")]
    Sum,
    #[error("a dynamic code needs a sum")]
    SumMissing,
    #[error("has an unknown, missing or repeated parameter")]
    Parameters,
    #[error("checksum does not match")]
    Checksum,
}

impl SbpLink {
    /// Makes a link of its parts.
    ///
    /// # Errors
    /// [`LinkError`] names the malformed part.
    pub fn new(
        id: &str,
        kind: LinkKind,
        bank: &str,
        sum: Option<Rub>,
    ) -> Result<SbpLink, LinkError> {
        let id_ok = id
            .bytes()
            .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit());
        if id.len() != ID_LEN || !id_ok {
            return Err(LinkError::Id);
        }
        if bank.len() != BANK_LEN || !bank.bytes().all(|b| b.is_ascii_digit()) {
            return Err(LinkError::Bank);
        }
        match sum {
            Some(sum) if !sum.is_positive() => return Err(LinkError::Sum),
            None if kind == LinkKind::Dynamic => return Err(LinkError::SumMissing),
            _ => {}
        }
        Ok(SbpLink {
            id: id.to_owned(),
            kind,
            bank: bank.to_owned(),
            sum,
        })
    }

    /// Reads a link and checks its checksum.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn parse(text: &str) -> Result<SbpLink, LinkError> {
        let rest = text.strip_prefix(PREFIX).ok_or(LinkError::Address)?;
        if !text.is_ascii() {
            return Err(LinkError::Address);
        }
        let (id, query) = rest.split_once('?').ok_or(LinkError::Parameters)?;
        let mut values: [Option<&str>; 5] = [None; 5];
        const NAMES: [&str; 5] = ["type", "bank", "sum", "cur", "crc"];
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').ok_or(LinkError::Parameters)?;
            let place = NAMES.iter().position(|known| *known == name);
            let slot = &mut values[place.ok_or(LinkError::Parameters)?];
            if slot.replace(value).is_some() {
                return Err(LinkError::Parameters);
            }
        }
        let [kind, bank, sum, currency, checksum] = values;
        let kind = match kind {
            Some("01") => LinkKind::Static,
            Some("02") => LinkKind::Dynamic,
            _ => return Err(LinkError::Type),
        };
        let sum = match (sum, currency) {
            (None, None) => None,
            (Some(sum), Some("RUB")) if sum.bytes().all(|b| b.is_ascii_digit()) => {
                let kopecks = sum.parse().map_err(|_| LinkError::Sum)?;
                Some(Rub::from_kopecks(kopecks))
            }
            _ => return Err(LinkError::Sum),
        };
        let link = SbpLink::new(id, kind, bank.ok_or(LinkError::Bank)?, sum)?;
        let given = checksum
            .filter(|crc| crc.len() == 4 && crc.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|crc| u16::from_str_radix(crc, 16).ok())
            .ok_or(LinkError::Checksum)?;
        let (signed, last) = text.rsplit_once("&crc=").ok_or(LinkError::Parameters)?;
        // The checksum does not cover a parameter after it.
        if Some(last) != checksum {
            return Err(LinkError::Checksum);
        }
        if crc16_ccitt_false(signed.as_bytes()) != given {
            return Err(LinkError::Checksum);
        }
        Ok(link)
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn kind(&self) -> LinkKind {
        self.kind
    }

    pub fn bank(&self) -> &str {
        &self.bank
    }

    pub fn sum(&self) -> Option<Rub> {
        self.sum
    }
}

/// Writes the link with an upper-case checksum.
impl fmt::Display for SbpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            LinkKind::Static => "01",
            LinkKind::Dynamic => "02",
        };
        let mut text = format!("{PREFIX}{}?type={kind}&bank={}", self.id, self.bank);
        if let Some(sum) = self.sum {
            text.push_str(&format!("&sum={}&cur=RUB", sum.kopecks()));
        }
        let checksum = crc16_ccitt_false(text.as_bytes());
        write!(f, "{text}&crc={checksum:04X}")
    }
}

/// CRC-16/CCITT-FALSE: polynomial 0x1021, initial value 0xFFFF, no reflection, no final XOR.
pub fn crc16_ccitt_false(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0xFFFF, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x1021
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_has_the_check_value_of_its_definition() {
        assert_eq!(crc16_ccitt_false(b"123456789"), 0x29B1);
        assert_eq!(crc16_ccitt_false(b""), 0xFFFF);
    }

    // rows: R111
    #[test]
    fn r111_public_links_are_read_and_written_again() {
        for text in [
            "https://qr.nspk.ru/AS10003P3RH0LJ2A9ROO038L6NT5RU1M?type=01&bank=000000000001&sum=10000&cur=RUB&crc=F3D0",
            "https://qr.nspk.ru/AD10001246OADML79D5OP9279JLPI2V6?type=02&bank=100000000001&sum=253&cur=RUB&crc=D959",
            "https://qr.nspk.ru/AD20003FNSGB5S1G8IJPACMUOLTR9SOJ?type=02&bank=100000000001&sum=10700&cur=RUB&crc=B770",
        ] {
            assert_eq!(SbpLink::parse(text).unwrap().to_string(), text);
        }
        // A static link without a sum, its checksum in lower case.
        let link = SbpLink::parse(
            "https://qr.nspk.ru/AS1A005O0HP24U9I8P0AN5VA03QFOL1F?type=01&bank=100000000111&crc=30da",
        )
        .unwrap();
        assert_eq!((link.kind(), link.sum()), (LinkKind::Static, None));
        assert!(link.to_string().ends_with("&crc=30DA"));
    }

    // rows: R111
    #[test]
    fn r111_other_texts_are_refused() {
        const ID: &str = "AD10001246OADML79D5OP9279JLPI2V6";
        let sealed = |text: &str| {
            let crc = crc16_ccitt_false(text.as_bytes());
            SbpLink::parse(&format!("{text}&crc={crc:04X}"))
        };
        let base = format!("https://qr.nspk.ru/{ID}");
        // A placeholder from a manual, and a sum added to a link by hand.
        for text in [
            "https://qr.nspk.ru/AD10006M8KH234K782OQM0L13JI31LQD?type=02&bank=000000000009&sum=200000&cur=RUB&crc=C08B",
            "https://qr.nspk.ru/AS100001ORTF4GAF80KPJ53K186D9A3G?type=01&bank=100000000111&sum=100&cur=RUB&crc=0C8A",
        ] {
            assert_eq!(SbpLink::parse(text), Err(LinkError::Checksum));
        }
        for (text, error) in [
            (
                "http://qr.nspk.ru/x?type=01&bank=100000000001".to_owned(),
                LinkError::Address,
            ),
            (
                "https://sub.nspk.ru/B1?type=01".to_owned(),
                LinkError::Address,
            ),
            (format!("{base}?type=03&bank=100000000001"), LinkError::Type),
            (
                format!("{base}?type=02&bank=100000000001"),
                LinkError::SumMissing,
            ),
            (
                format!("{base}?type=02&bank=100000000001&sum=0&cur=RUB"),
                LinkError::Sum,
            ),
            (
                format!("{base}?type=02&bank=100000000001&sum=-1&cur=RUB"),
                LinkError::Sum,
            ),
            (
                format!("{base}?type=02&bank=100000000001&sum=1&cur=643"),
                LinkError::Sum,
            ),
            (
                format!("{base}?type=02&bank=1&sum=1&cur=RUB"),
                LinkError::Bank,
            ),
            (
                format!("{base}?type=02&type=02&bank=100000000001&sum=1&cur=RUB"),
                LinkError::Parameters,
            ),
            (
                format!("{base}?t=20261121T0101&s=1.00&fn=1&i=2&fp=3&n=1"),
                LinkError::Parameters,
            ),
            (
                "https://qr.nspk.ru/short?type=01&bank=100000000001".to_owned(),
                LinkError::Id,
            ),
        ] {
            assert_eq!(sealed(&text), Err(error), "{text}");
        }
        // The checksum does not cover parameters after it.
        let signed = format!("{base}?type=01&bank=100000000001");
        let crc = crc16_ccitt_false(signed.as_bytes());
        assert!(SbpLink::parse(&format!("{signed}&crc={crc:04X}")).is_ok());
        assert_eq!(
            SbpLink::parse(&format!("{signed}&crc={crc:04X}&sum=253&cur=RUB")),
            Err(LinkError::Checksum)
        );
        assert_eq!(
            SbpLink::parse(&format!("{base}?type=01&bank=100000000001")),
            Err(LinkError::Checksum)
        );
    }

    #[test]
    fn any_single_changed_character_is_detected() {
        let text = "https://qr.nspk.ru/AD10001246OADML79D5OP9279JLPI2V6?type=02&bank=100000000001\
                    &sum=253&cur=RUB&crc=D959";
        for at in 0..text.len() {
            let mut bytes = text.as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'7' { b'8' } else { b'7' };
            let changed = String::from_utf8(bytes).unwrap();
            assert!(SbpLink::parse(&changed).is_err(), "{changed}");
        }
    }
}
