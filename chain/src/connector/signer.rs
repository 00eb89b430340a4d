//! The account that signs: a key file, or a remote signer (Web3Signer's `eth_signTransaction`).

use alloy::consensus::transaction::SignerRecoverable;
use alloy::consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy::eips::Decodable2718;
use alloy::primitives::{Address as RawAddress, Bytes, TxKind};
use alloy::rpc::client::RpcClient;
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use alloy::transports::RpcError;
use serde_json::{Value, json};

use super::ChainError;
use crate::Address;

pub(crate) enum Signer {
    /// A private key in this process.
    Key(PrivateKeySigner),
    /// A signer that holds the key of `address`.
    Remote {
        client: RpcClient,
        address: RawAddress,
    },
}

impl Signer {
    pub fn address(&self) -> RawAddress {
        match self {
            Self::Key(key) => key.address(),
            Self::Remote { address, .. } => *address,
        }
    }

    /// # Errors
    /// `Unavailable`: the remote signer did not answer. `Signature`: it refused, or its answer is
    /// not the transaction signed by the account.
    pub async fn sign(&self, tx: TxEip1559) -> Result<TxEnvelope, ChainError> {
        match self {
            Self::Key(key) => {
                let signature = key
                    .sign_hash_sync(&tx.signature_hash())
                    .map_err(|error| ChainError::Signature(error.to_string()))?;
                Ok(TxEnvelope::from(tx.into_signed(signature)))
            }
            Self::Remote { client, address } => {
                let answer: Value = client
                    .request("eth_signTransaction", (request(*address, &tx),))
                    .await
                    .map_err(|error| match error {
                        RpcError::ErrorResp(payload) => {
                            ChainError::Signature(payload.message.into_owned())
                        }
                        other => ChainError::Unavailable(format!("remote signer: {other}")),
                    })?;
                check(*address, &tx, &answer)
            }
        }
    }
}

/// The parameter of `eth_signTransaction`.
fn request(from: RawAddress, tx: &TxEip1559) -> Value {
    let mut request = json!({
        "from": Address::from(from).to_string(),
        "gas": format!("{:#x}", tx.gas_limit),
        "maxFeePerGas": format!("{:#x}", tx.max_fee_per_gas),
        "maxPriorityFeePerGas": format!("{:#x}", tx.max_priority_fee_per_gas),
        "value": format!("{:#x}", tx.value),
        "nonce": format!("{:#x}", tx.nonce),
        "data": tx.input.to_string(),
        "chainId": format!("{:#x}", tx.chain_id),
    });
    if let TxKind::Call(to) = tx.to {
        request["to"] = json!(Address::from(to).to_string());
    }
    request
}

/// Decodes the answer: the bytes in hex (Web3Signer), or an object with them in `raw` (geth).
fn check(from: RawAddress, asked: &TxEip1559, answer: &Value) -> Result<TxEnvelope, ChainError> {
    let wrong = |what: &str| ChainError::Signature(format!("remote signer: {what}"));
    let text = answer.as_str().or_else(|| answer["raw"].as_str());
    let text = text.ok_or_else(|| wrong("the answer contains no transaction"))?;
    let raw: Bytes = text
        .parse()
        .map_err(|_| wrong("the answer is not hexadecimal"))?;
    let envelope = TxEnvelope::decode_2718_exact(raw.as_ref())
        .map_err(|error| wrong(&format!("the answer is not a transaction: {error}")))?;
    let is_asked = envelope
        .as_eip1559()
        .is_some_and(|signed| signed.tx() == asked);
    if !is_asked {
        return Err(wrong("the signed transaction differs from the request"));
    }
    match envelope.recover_signer() {
        Ok(signer) if signer == from => Ok(envelope),
        _ => Err(wrong(&format!(
            "the transaction is not signed by {}",
            Address::from(from)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use alloy::eips::Encodable2718;

    use super::*;

    fn transaction(nonce: u64) -> TxEip1559 {
        TxEip1559 {
            chain_id: 7,
            nonce,
            gas_limit: 21_000,
            max_fee_per_gas: 10,
            max_priority_fee_per_gas: 1,
            to: TxKind::Call(RawAddress::with_last_byte(5)),
            input: Bytes::from(vec![0xab]),
            ..TxEip1559::default()
        }
    }

    fn signed(key: &PrivateKeySigner, tx: TxEip1559) -> Value {
        let signature = key.sign_hash_sync(&tx.signature_hash()).unwrap();
        let envelope = TxEnvelope::from(tx.into_signed(signature));
        json!(format!("0x{}", hex::encode(envelope.encoded_2718())))
    }

    // rows: R020
    #[test]
    fn r020_a_remote_signature_is_taken_only_of_the_account_and_the_transaction() {
        let [key, other] = [PrivateKeySigner::random(), PrivateKeySigner::random()];
        let from = key.address();
        let asked = transaction(1);
        let answer = signed(&key, asked.clone());
        assert!(check(from, &asked, &answer).is_ok());
        assert!(check(from, &asked, &json!({ "raw": answer })).is_ok());
        let [elsewhere, changed] = [signed(&other, asked.clone()), signed(&key, transaction(2))];
        for wrong in [elsewhere, changed, json!("0x12"), json!(null), json!("x")] {
            let refused = check(from, &asked, &wrong);
            assert!(matches!(refused, Err(ChainError::Signature(_))), "{wrong}");
        }
    }

    #[test]
    fn the_request_has_hexadecimal_quantities_and_no_recipient_for_a_deployment() {
        let from = RawAddress::with_last_byte(9);
        let call = request(from, &transaction(0));
        assert_eq!(call["nonce"], "0x0");
        assert_eq!(call["gas"], "0x5208");
        assert_eq!(call["data"], "0xab");
        assert_eq!(call["value"], "0x0");
        assert_eq!(call["to"], "0x0000000000000000000000000000000000000005");
        let deployment = TxEip1559 {
            to: TxKind::Create,
            ..transaction(0)
        };
        assert_eq!(request(from, &deployment).get("to"), None);
    }
}
