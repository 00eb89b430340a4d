//! Content of an extract from the register of holders: pure functions.
//!
//! An extract is about one holder and one issue, at a time. CSV has a row per value. Text and PDF
//! are the same statement in Russian, for a holder, a court or a bailiff. The signature is
//! separate.

use service_kit::csv::row;
use service_kit::pdf;
use time::OffsetDateTime;
use types::Decimal;

use crate::model::{EnforcementAct, ExtractFormat, ExtractRecipient, Instrument};
use crate::plan;

const MOSCOW_S: i64 = 3 * 3_600;

/// What an extract states.
#[derive(Debug, Clone)]
pub struct Facts {
    pub extract_id: String,
    pub instrument: Instrument,
    pub holder_id: String,
    pub address: String,
    pub as_of_us: i64,
    pub issued_at_us: i64,
    pub recipient: ExtractRecipient,
    /// Request of the court or bailiff; empty for the holder.
    pub document: String,
    /// Units of the holder and of all holders at that time.
    pub units_minor: i64,
    pub supply_minor: i64,
    /// Last block that changed the holder's units by then; 0: none.
    pub block_number: u64,
    /// Freezes that were ordered by that time, newest first, in their state when the extract is
    /// issued.
    pub freezes: Vec<EnforcementAct>,
    /// There are older freezes, which are not among them.
    pub has_older_freezes: bool,
    /// Subject of the operator's certificate.
    pub signer: String,
}

impl Facts {
    pub fn content(&self, format: ExtractFormat) -> Vec<u8> {
        match format {
            ExtractFormat::Csv => self.csv().into_bytes(),
            ExtractFormat::Text => (self.lines().join("\n") + "\n").into_bytes(),
            ExtractFormat::Pdf => {
                let title = format!("Выписка {}", self.extract_id);
                pdf::document(&title, &self.extract_id, &self.lines())
            }
        }
    }

    fn units(&self, units_minor: i64) -> String {
        Decimal::from_minor(units_minor, self.instrument.decimals).to_string()
    }

    fn amount(&self, act: &EnforcementAct) -> Option<String> {
        (!act.is_whole()).then(|| self.units(act.units_minor))
    }

    /// Rows `name,value`; a freeze is a row `freeze` with five values. The last row is
    /// `older_freezes,omitted` if older freezes are left out.
    fn csv(&self) -> String {
        let share = plan::share_percent(self.units_minor, self.supply_minor).to_string();
        let values = [
            ("extract_id", self.extract_id.clone()),
            ("instrument_id", self.instrument.instrument_id.clone()),
            ("instrument_name", self.instrument.name.clone()),
            ("issuer_id", self.instrument.issuer_id.clone()),
            ("document_hash", self.instrument.document_hash.clone()),
            ("holder_id", self.holder_id.clone()),
            ("address", self.address.clone()),
            ("as_of", moscow(self.as_of_us)),
            ("block_number", self.block_number.to_string()),
            ("units", self.units(self.units_minor)),
            ("supply", self.units(self.supply_minor)),
            ("share_percent", share),
            ("recipient", self.recipient.as_str().to_owned()),
            ("request", self.document.clone()),
            ("issued_at", moscow(self.issued_at_us)),
            ("signer", self.signer.clone()),
        ];
        let mut rows: Vec<String> = vec![row(&["name", "value"])];
        rows.extend(values.iter().map(|(name, value)| row(&[name, value])));
        for act in &self.freezes {
            let units = self.amount(act).unwrap_or_else(|| "all".to_owned());
            let created = moscow(act.created_at_us);
            let (basis, status) = (act.basis.as_str(), act.status.as_str());
            rows.push(row(&[
                "freeze",
                &units,
                basis,
                &act.document,
                &created,
                status,
            ]));
        }
        if self.has_older_freezes {
            rows.push(row(&["older_freezes", "omitted"]));
        }
        rows.concat()
    }

    /// The statement.
    fn lines(&self) -> Vec<String> {
        let instrument = &self.instrument;
        let mut lines = vec![
            "ВЫПИСКА ИЗ РЕЕСТРА ПОЛЬЗОВАТЕЛЕЙ ИНФОРМАЦИОННОЙ СИСТЕМЫ".to_owned(),
            "о цифровых финансовых активах владельца (259-ФЗ)".to_owned(),
            String::new(),
            format!("Номер выписки: {}", self.extract_id),
            format!("Получатель: {}", recipient(self.recipient)),
        ];
        if !self.document.is_empty() {
            lines.push(format!("Основание выдачи: {}", self.document));
        }
        lines.extend([
            format!("Выпуск: {} ({})", instrument.instrument_id, instrument.name),
            format!("Эмитент: {}", instrument.issuer_id),
            format!("Хеш решения о выпуске: {}", instrument.document_hash),
            format!("Владелец: {}, адрес {}", self.holder_id, self.address),
            format!("По состоянию на: {}", moscow(self.as_of_us)),
            format!("Блок: {}", self.block_number),
            format!(
                "Количество: {} из {} ({} %)",
                self.units(self.units_minor),
                self.units(self.supply_minor),
                plan::share_percent(self.units_minor, self.supply_minor),
            ),
            "Обременения:".to_owned(),
        ]);
        if self.freezes.is_empty() {
            lines.push("- нет".to_owned());
        }
        for act in &self.freezes {
            let units = self.amount(act).unwrap_or_else(|| "все".to_owned());
            let created = moscow(act.created_at_us);
            let (document, status) = (&act.document, act.status.as_str());
            lines.push(format!(
                "- {units}, {document}, с {created}, состояние при выдаче {status}"
            ));
        }
        if self.has_older_freezes {
            let count = self.freezes.len();
            lines.push(format!(
                "Указаны последние {count} обременений, более ранние не указаны."
            ));
        }
        lines.extend([
            format!("Дата выдачи: {}", moscow(self.issued_at_us)),
            format!("Подпись оператора: отсоединённая CMS, {}", self.signer),
        ]);
        lines
    }
}

fn recipient(of: ExtractRecipient) -> &'static str {
    match of {
        ExtractRecipient::Holder => "владелец",
        ExtractRecipient::Court => "суд",
        ExtractRecipient::Bailiff => "судебный пристав-исполнитель",
    }
}

/// Moscow time (UTC+3, no summer time).
fn moscow(time_us: i64) -> String {
    let shifted = OffsetDateTime::from_unix_timestamp(time_us.div_euclid(1_000_000) + MOSCOW_S);
    shifted.map_or_else(
        |_| String::new(),
        |at| {
            let (hour, minute, second) = (at.hour(), at.minute(), at.second());
            format!("{} {hour:02}:{minute:02}:{second:02} +03:00", at.date())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_moscow() {
        // 2026-11-21T21:00:00Z is midnight in Moscow.
        assert_eq!(moscow(1_795_294_800_000_000), "2026-11-22 00:00:00 +03:00");
    }
}
