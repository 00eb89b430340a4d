//! Order flow files for `platform replay`.

use crate::lobster::{format, parse};

/// Parses the lines of any text as rows.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    for line in text.lines() {
        if let Ok(row) = parse(line) {
            assert_eq!(parse(&format(&row)).expect("a formatted row parses"), row);
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    [
        "34200.004241176,1,16113575,18,5853300,1",
        "34200.0042411760003,2,16113575,18,5853300,-1\n34201,4,1,1,1,1,more",
        "18446744073.709551615,3,18446744073709551615,0,-9223372036854775808,1",
        "99999999999999999999.0,5,1,1,1,1",
        "18446744074.0,1,1,1,1,1",
        "57600,7,0,0,-1,-1",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
