//! Mutations of a request's body, headers and credential.

use prost::Message;
use prost_reflect::MethodDescriptor;
use serde_json::Value;

use super::{DEADLINE, Must, Mutation};
use crate::wire;

/// Levels of nested JSON.
const NESTED: usize = 10_000;
/// Largest body of a caller that is no service.
const BODY_BYTES_MAX: usize = rpc::MESSAGE_BYTES_MAX;

/// Mutations of this request of the method.
pub fn of(method: &MethodDescriptor, base: &Value) -> Vec<Mutation> {
    let json = base.to_string();
    let mut all = texts(&json);
    all.extend(credentials(&json));
    all.extend(headers(method, base, &json));
    all
}

fn texts(json: &str) -> Vec<Mutation> {
    let open = json.trim_end_matches('}').to_owned();
    // The base is an object with a context: another member can be added at its end.
    let with = |members: &str| format!("{},{members}}}", &json[..json.len() - 1]);
    let bad = |what: &str, body: String| Mutation::json(what, body, Must::Refuse);
    let nested = |open: &str| with(&format!("\"x\":{}", open.repeat(NESTED)));
    let mut all = vec![
        bad("an empty body", String::new()),
        bad("an open object", "{".to_owned()),
        bad("an array", "[]".to_owned()),
        bad("a number", "5".to_owned()),
        bad("a text", "\"x\"".to_owned()),
        bad("two objects", "{} {}".to_owned()),
        bad("a body without its end", open),
        bad("the first half of the body", half(json)),
        bad("a comma at the end", with("")),
        bad("an unknown field", with("\"noSuchField\":1")),
        bad("a comment", with("/* x */\"noSuchField\":1")),
        bad("the literal NaN", with("\"x\":NaN")),
        bad("deeply nested arrays", nested("[")),
        bad("deeply nested objects", nested("{\"x\":")),
        bad(
            "a context in a context",
            with("\"context\":{\"context\":{}}"),
        ),
        Mutation::json("null", "null", Must::Answer),
        Mutation::json("a member twice", with("\"context\":null"), Must::Answer),
        Mutation::json(
            "a byte order mark",
            [&b"\xef\xbb\xbf"[..], json.as_bytes()].concat(),
            Must::Answer,
        ),
        Mutation::json(
            "bytes that are no text",
            b"{\"\xff\":1}".to_vec(),
            Must::Refuse,
        ),
        Mutation::json("zeros", vec![0; 64], Must::Refuse),
    ];
    let long = format!("\"x\":\"{}\"", "x".repeat(BODY_BYTES_MAX));
    all.push(Mutation::json(
        "a body above the limit",
        with(&long),
        Must::RefuseOrClose,
    ));
    all
}

/// The first half of a text.
fn half(text: &str) -> String {
    let middle = (0..=text.len() / 2)
        .rev()
        .find(|at| text.is_char_boundary(*at));
    text[..middle.unwrap_or_default()].to_owned()
}

fn credentials(json: &str) -> Vec<Mutation> {
    [
        ("no credential", ""),
        ("an unknown credential", "nonsense"),
        ("an unknown role", "sandbox.root"),
        ("a service as a user", "sandbox.service.ghost"),
    ]
    .into_iter()
    .map(|(what, token)| Mutation {
        token: Some(token),
        ..Mutation::json(what, json, Must::Refuse)
    })
    .collect()
}

fn headers(method: &MethodDescriptor, base: &Value, json: &str) -> Vec<Mutation> {
    let with = |what: &str, name, value| Mutation {
        headers: vec![(name, value)],
        ..Mutation::json(what, json, Must::Answer)
    };
    let of_type = |what: &str, content_type, body: Vec<u8>, must| {
        Mutation::new(what.to_owned(), content_type, body, must)
    };
    let binary = wire::message(method.input(), base).encode_to_vec();
    let text = || json.as_bytes().to_vec();
    let verb = |what: &str, verb| Mutation {
        verb,
        ..Mutation::json(what, json, Must::Answer)
    };
    vec![
        with("a deadline of 1 ms", DEADLINE, "1"),
        with("a deadline of 0 ms", DEADLINE, "0"),
        with("no deadline", DEADLINE, "abc"),
        with("a negative deadline", DEADLINE, "-1"),
        with("an endless deadline", DEADLINE, "9999999999999999"),
        with("an unknown version", "connect-protocol-version", "2"),
        with("a false compression", "content-encoding", "gzip"),
        Mutation {
            must: Must::Unimplemented,
            ..with("an unknown compression", "content-encoding", "rot13")
        },
        with(
            "an unknown compression of the answer",
            "accept-encoding",
            "rot13",
        ),
        of_type("plain text", "text/plain", text(), Must::Refuse),
        of_type("XML", "application/xml", text(), Must::Refuse),
        of_type(
            "another character set",
            "application/json; charset=utf-16",
            text(),
            Must::Answer,
        ),
        of_type("JSON as binary", "application/proto", text(), Must::Refuse),
        of_type("binary as JSON", "application/json", binary, Must::Refuse),
        verb("a GET without a query", reqwest::Method::GET),
        verb("a PUT", reqwest::Method::PUT),
        verb("a DELETE", reqwest::Method::DELETE),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::wire::{method, pool};

    #[test]
    fn every_body_differs_from_the_base_or_its_headers_do() {
        let base = json!({ "context": { "requestId": "r" }, "instrumentId": "B" });
        let pool = pool();
        let all = of(&method(&pool, "cfa.GetInstrument"), &base);
        assert!(all.len() > 35, "{}", all.len());
        let text = base.to_string().into_bytes();
        for one in all {
            let is_base = one.body == text
                && one.headers.is_empty()
                && one.token.is_none()
                && one.verb == reqwest::Method::POST
                && one.content_type == "application/json";
            assert!(!is_base, "{}", one.what);
        }
    }

    #[test]
    fn a_half_ends_between_two_characters() {
        assert_eq!(half("abcd"), "ab");
        assert_eq!(half("\u{1f980}"), "");
    }
}
