//! Placement of an issue among subscribers (F34): its terms, its progress and the allotment. Pure:
//! no clock, no I/O.
//!
//! Units are subscribed, allotted and paid in whole lots at one price, so every amount is exact.
//! The allotment depends only on the terms and on the subscriptions in the order of their ids,
//! which is that of their creation. The sum of the allotments never exceeds the size, and no
//! subscription gets more than it asked for.

use std::cmp::Reverse;

use types::{Decimal, code_enum};

use crate::error::Refusal;
use crate::model::CFA_RUB_DECIMALS;

/// Longest placement period, in microseconds: 366 days.
pub const PERIOD_US_MAX: i64 = 366 * 24 * 3_600 * 1_000_000;

code_enum! {
    Allotment: i32 {
        /// Subscriptions in order until the units are allotted.
        FirstCome = 1 "FIRST_COME",
        /// Shares in whole lots; the lots that are left go to the largest remainders.
        ProRata = 2 "PRO_RATA",
    }
}

code_enum! {
    PlacementStatus: i32 {
        Open = 1 "OPEN",
        Closing = 2 "CLOSING",
        Allotting = 3 "ALLOTTING",
        Placed = 4 "PLACED",
        Failed = 5 "FAILED",
    }
}

code_enum! {
    /// The next step of a placement. Stored, so a restart continues with it.
    Stage: i32 {
        /// Until the end of the period.
        Subscribe = 1 "SUBSCRIBE",
        /// Makes pending holds, asks identity about subscribers, then decides.
        Screen = 2 "SCREEN",
        /// Releases the payments of subscriptions without an allotment.
        Release = 3 "RELEASE",
        /// Issues all allotted units to the placement account.
        Mint = 4 "MINT",
        /// Exchanges units for payments, in parts.
        Deliver = 5 "DELIVER",
        /// Pays the raised money to the issuer.
        Pay = 6 "PAY",
        /// Burns units that could not be delivered.
        Burn = 7 "BURN",
        Done = 8 "DONE",
    }
}

/// Terms of a placement. Units are smallest units of the instrument, money is kopecks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementTerms {
    pub opens_at_us: i64,
    pub closes_at_us: i64,
    /// Roubles per unit.
    pub price: Decimal,
    /// Payments that the allotment must reach; 0: none.
    pub minimum_minor: i64,
    /// Least units of a subscription; 0: none.
    pub investor_min_minor: i64,
    /// Most units of an investor's subscriptions; 0: no limit.
    pub investor_max_minor: i64,
    pub allotment: Allotment,
}

/// A placement and its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub instrument_id: String,
    pub terms: PlacementTerms,
    pub stage: Stage,
    /// No units are issued.
    pub failed: bool,
    /// Pending and active subscriptions, and their units. Kept by triggers of the store.
    pub live: i64,
    pub subscribed_minor: i64,
    /// Last subscription that was screened.
    pub screened_through: String,
    /// Allotted subscriptions, numbered from 1.
    pub allotted_count: i64,
    pub allotted_minor: i64,
    /// Completed parts of the delivery.
    pub parts_done: i64,
    pub issued_minor: i64,
    pub raised_minor: i64,
    /// Reverted chain transactions. Each try of a transaction has a key of its own.
    pub attempts: u32,
    pub closed_at_us: Option<i64>,
}

impl Placement {
    pub fn new(instrument_id: &str, terms: PlacementTerms) -> Self {
        Self {
            instrument_id: instrument_id.to_owned(),
            terms,
            stage: Stage::Subscribe,
            failed: false,
            live: 0,
            subscribed_minor: 0,
            screened_through: String::new(),
            allotted_count: 0,
            allotted_minor: 0,
            parts_done: 0,
            issued_minor: 0,
            raised_minor: 0,
            attempts: 0,
            closed_at_us: None,
        }
    }

    pub fn status(&self) -> PlacementStatus {
        match self.stage {
            Stage::Subscribe => PlacementStatus::Open,
            Stage::Screen => PlacementStatus::Closing,
            _ if self.failed => PlacementStatus::Failed,
            Stage::Done => PlacementStatus::Placed,
            Stage::Release | Stage::Mint | Stage::Deliver | Stage::Pay | Stage::Burn => {
                PlacementStatus::Allotting
            }
        }
    }

    /// Whether units may still be issued.
    pub fn is_under_way(&self) -> bool {
        !matches!(
            self.status(),
            PlacementStatus::Placed | PlacementStatus::Failed
        )
    }

    pub fn accepts_at(&self, now_us: i64) -> bool {
        let terms = &self.terms;
        self.stage == Stage::Subscribe && (terms.opens_at_us..terms.closes_at_us).contains(&now_us)
    }

    /// The step after this one.
    pub fn next_stage(&self) -> Stage {
        match self.stage {
            Stage::Subscribe => Stage::Screen,
            Stage::Screen => Stage::Release,
            Stage::Release if self.failed => Stage::Done,
            Stage::Release => Stage::Mint,
            Stage::Mint => Stage::Deliver,
            Stage::Deliver => Stage::Pay,
            Stage::Pay => Stage::Burn,
            Stage::Burn | Stage::Done => Stage::Done,
        }
    }
}

/// Size of a lot and what it costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lot {
    /// Smallest units.
    pub units_minor: i64,
    /// Kopecks.
    pub payment_minor: i64,
}

impl Lot {
    /// A lot of `lot_size` units of an instrument at a price.
    ///
    /// # Errors
    /// An invalid `placement.price`: a lot does not cost a whole number of kopecks above zero.
    pub fn new(lot_size: Decimal, decimals: u8, price: Decimal) -> Result<Self, Refusal> {
        let why = "a lot must cost a whole number of kopecks above zero";
        let invalid = || Refusal::field("placement.price", why);
        let payment = lot_size.checked_mul(price).map_err(|_| invalid())?;
        let payment_minor = payment.to_minor(CFA_RUB_DECIMALS).map_err(|_| invalid())?;
        let units_minor = lot_size.to_minor(decimals).map_err(|_| invalid())?;
        if payment_minor <= 0 || units_minor <= 0 {
            return Err(invalid());
        }
        Ok(Self {
            units_minor,
            payment_minor,
        })
    }

    /// The lots of a number of units. `None` if they are not whole lots.
    pub fn count(self, units_minor: i64) -> Option<i64> {
        (units_minor % self.units_minor == 0).then_some(units_minor / self.units_minor)
    }

    /// What a number of lots costs. `None` beyond 64 bits.
    pub fn payment(self, lots: i64) -> Option<i64> {
        self.payment_minor.checked_mul(lots)
    }
}

/// Lots for each of the asked numbers of lots, at most `size` together.
///
/// # Panics
/// If `size` or an asked number is negative.
pub fn allot(rule: Allotment, size: i64, asked: &[i64]) -> Vec<i64> {
    assert!(size >= 0 && asked.iter().all(|lots| *lots >= 0));
    let total: i128 = asked.iter().map(|lots| i128::from(*lots)).sum();
    if total <= i128::from(size) {
        return asked.to_vec();
    }
    let allotted = match rule {
        Allotment::FirstCome => first_come(size, asked),
        Allotment::ProRata => pro_rata(size, asked, total),
    };
    let sum: i128 = allotted.iter().map(|lots| i128::from(*lots)).sum();
    assert_eq!(sum, i128::from(size), "an oversubscribed issue is allotted");
    allotted
}

fn first_come(size: i64, asked: &[i64]) -> Vec<i64> {
    let mut left = size;
    let take = |lots: &i64| {
        let taken = (*lots).min(left);
        left -= taken;
        taken
    };
    asked.iter().map(take).collect()
}

/// `total` is the sum of `asked` and above `size`.
fn pro_rata(size: i64, asked: &[i64], total: i128) -> Vec<i64> {
    let mut allotted = Vec::with_capacity(asked.len());
    let mut rests = Vec::with_capacity(asked.len());
    let mut left = size;
    for (index, lots) in asked.iter().enumerate() {
        let share = i128::from(*lots) * i128::from(size);
        // At most `lots`, because the total is above the size.
        let whole = i64::try_from(share / total).expect("a share is at most what was asked");
        left -= whole;
        allotted.push(whole);
        rests.push((Reverse(share % total), index));
    }
    // The number of lots left is below that of remainders above zero.
    rests.sort_unstable();
    for (_, index) in rests.into_iter().take(left as usize) {
        allotted[index] += 1;
    }
    allotted
}

/// Result of the end of a placement period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Lots of each subscription, in the order of the subscriptions.
    Allot(Vec<i64>),
    /// No units are subscribed, or the payments do not reach the minimum.
    Fail(&'static str),
}

/// Decides about subscriptions of `asked` lots for `size` lots.
pub fn decide(terms: &PlacementTerms, lot: Lot, size: i64, asked: &[i64]) -> Decision {
    let allotted = allot(terms.allotment, size, asked);
    let lots: i64 = allotted.iter().sum();
    if lots == 0 {
        return Decision::Fail("no units are subscribed");
    }
    // Registration has checked that the whole issue fits 64 bits.
    let raised = lot.payment(lots).unwrap_or(i64::MAX);
    if raised < terms.minimum_minor {
        return Decision::Fail("the minimum sum is not reached");
    }
    Decision::Allot(allotted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// splitmix64.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) % end
        }
    }

    fn terms(allotment: Allotment, minimum_minor: i64) -> PlacementTerms {
        PlacementTerms {
            opens_at_us: 10,
            closes_at_us: 20,
            price: "1000".parse().expect("number"),
            minimum_minor,
            investor_min_minor: 0,
            investor_max_minor: 0,
            allotment,
        }
    }

    const LOT: Lot = Lot {
        units_minor: 10,
        payment_minor: 10_000,
    };

    #[test]
    fn f34_oversubscription_by_each_rule() {
        use Allotment::{FirstCome, ProRata};
        for (rule, size, asked, expected) in [
            (FirstCome, 10, vec![4, 4, 4, 4], vec![4, 4, 2, 0]),
            (ProRata, 10, vec![4, 4, 4, 4], vec![3, 3, 2, 2]),
            // 5/9, 30/9, 10/9: the largest remainders are 5/9 and 3/9.
            (ProRata, 5, vec![1, 6, 2], vec![1, 3, 1]),
            (ProRata, 1, vec![1, 1, 1], vec![1, 0, 0]),
            (ProRata, 10, vec![4, 4], vec![4, 4]),
            (FirstCome, 0, vec![3], vec![0]),
            (ProRata, 3, vec![], vec![]),
        ] {
            assert_eq!(
                allot(rule, size, &asked),
                expected,
                "{rule} {size} {asked:?}"
            );
        }
        // Products beyond 64 bits.
        let large = [i64::MAX, i64::MAX, 1];
        assert_eq!(allot(ProRata, 3, &large), [2, 1, 0]);
    }

    /// Of every allotment: the sum is the smaller of size and demand, no subscription gets more
    /// than it asked for, and a share differs from the exact one by less than a lot.
    #[test]
    fn f34_random_allotments_keep_their_invariants() {
        let mut random = Random(34);
        for round in 0..2_000 {
            let count = random.below(40) as usize;
            let most = [1, 3, 1_000, 1 << 40][round % 4];
            let asked: Vec<i64> = (0..count).map(|_| random.below(most) as i64 + 1).collect();
            let total: i128 = asked.iter().map(|lots| i128::from(*lots)).sum();
            let size = random.below(most * 20) as i64;
            for rule in Allotment::ALL {
                let allotted = allot(*rule, size, &asked);
                let sum: i128 = allotted.iter().map(|lots| i128::from(*lots)).sum();
                assert_eq!(sum, total.min(i128::from(size)), "{rule} {size} {asked:?}");
                let pairs = || allotted.iter().zip(&asked);
                assert!(pairs().all(|(got, asked)| (0..=*asked).contains(got)));
                assert_eq!(allotted, allot(*rule, size, &asked), "deterministic");
                if *rule == Allotment::ProRata && total > i128::from(size) {
                    let near = |(got, asked): (&i64, &i64)| {
                        let exact = i128::from(*asked) * i128::from(size);
                        (i128::from(*got) * total - exact).abs() < total
                    };
                    assert!(pairs().all(near), "{size} {asked:?} {allotted:?}");
                }
            }
        }
    }

    /// Two pages of 10,000 subscriptions.
    #[test]
    fn f34_twenty_thousand_subscriptions_are_allotted() {
        let asked: Vec<i64> = (0..20_000).map(|index| index % 97 + 1).collect();
        for rule in Allotment::ALL {
            let allotted = allot(*rule, 123_456, &asked);
            assert_eq!(allotted.iter().sum::<i64>(), 123_456);
        }
    }

    #[test]
    fn f34_a_placement_below_its_minimum_fails() {
        let asked = [2, 3];
        let decide_at = |minimum| decide(&terms(Allotment::FirstCome, minimum), LOT, 10, &asked);
        assert_eq!(decide_at(50_000), Decision::Allot(vec![2, 3]));
        assert!(matches!(decide_at(50_001), Decision::Fail(_)));
        // What is above the size does not count.
        let capped = decide(&terms(Allotment::ProRata, 50_000), LOT, 4, &asked);
        assert!(matches!(capped, Decision::Fail(_)));
        let empty = decide(&terms(Allotment::ProRata, 0), LOT, 4, &[]);
        assert!(matches!(empty, Decision::Fail(_)));
    }

    #[test]
    fn a_lot_costs_whole_kopecks() {
        let number = |text: &str| text.parse::<Decimal>().expect("number");
        let lot = Lot::new(number("0.1"), 3, number("99.90")).expect("a lot");
        assert_eq!((lot.units_minor, lot.payment_minor), (100, 999));
        assert_eq!((lot.count(300), lot.count(350)), (Some(3), None));
        for (size, price) in [("0.1", "99.91"), ("1", "0"), ("1", "-1"), ("0.0001", "100")] {
            let refused = Lot::new(number(size), 3, number(price));
            assert!(refused.is_err(), "{size} {price}");
        }
    }

    #[test]
    fn the_stages_lead_to_an_end_and_have_a_status() {
        for (failed, expected) in [
            (true, PlacementStatus::Failed),
            (false, PlacementStatus::Placed),
        ] {
            let mut placement = Placement::new("BOND-1", terms(Allotment::FirstCome, 0));
            assert!(placement.accepts_at(10) && placement.accepts_at(19));
            assert!(!placement.accepts_at(9) && !placement.accepts_at(20));
            for _ in Stage::ALL {
                placement.stage = placement.next_stage();
                placement.failed = failed && placement.stage.code() >= Stage::Release.code();
                assert!(!placement.accepts_at(15));
            }
            assert_eq!(
                (placement.stage, placement.status()),
                (Stage::Done, expected)
            );
            assert!(!placement.is_under_way());
        }
    }
}
