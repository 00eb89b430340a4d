//! Generates a load: a seeded mix of resting orders, cancels, amends and immediate-or-cancel
//! orders.
//!
//! Members with an even number buy, the others sell, so no order meets one of the same user.
//! Resting buys are below the middle price and resting sells above it, so only
//! immediate-or-cancel orders trade.

use std::str::FromStr;

use types::{Side, TimeInForce};
use wire::{Amend, Cancel, ClientMessage, NewOrder};

use crate::replay::synthetic::Random;

/// Middle price of resting orders, in ticks of a kopeck.
const MIDDLE_TICKS: i64 = 10_000;
/// Maximum distance of a resting order from the middle price, and how far beyond it an
/// immediate-or-cancel order reaches.
const AWAY_TICKS: u64 = 50;
/// Maximum lots per order.
const LOTS_MAX: u64 = 9;
/// Maximum open orders per session; above it a cancel is sent instead.
const OPEN_MAX: usize = 64;

/// Kopecks that one order needs at most, including its fee.
pub const MONEY_PER_ORDER: i64 =
    (MIDDLE_TICKS + AWAY_TICKS as i64) * LOTS_MAX as i64 * 1_002 / 1_000 + 1;
/// Units that one order needs at most.
pub const UNITS_PER_ORDER: u64 = LOTS_MAX;
/// Price band of the instrument, in kopecks.
pub const BAND: (i64, i64) = (MIDDLE_TICKS / 2, MIDDLE_TICKS * 2);

/// Percentages of the request types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    pub new: u64,
    pub cancel: u64,
    pub amend: u64,
    pub ioc: u64,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            new: 47,
            cancel: 38,
            amend: 8,
            ioc: 7,
        }
    }
}

impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            new,
            cancel,
            amend,
            ioc,
        } = self;
        write!(f, "{new},{cancel},{amend},{ioc}")
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shares: Result<Vec<u64>, _> = text.split(',').map(str::parse).collect();
        match shares.as_deref() {
            Ok(&[new, cancel, amend, ioc])
                if [new, cancel, amend, ioc].iter().sum::<u64>() == 100 =>
            {
                Ok(Self {
                    new,
                    cancel,
                    amend,
                    ioc,
                })
            }
            _ => Err("expected four percentages that sum to 100: new,cancel,amend,ioc".to_owned()),
        }
    }
}

/// Request generator. The seed and the answers determine the requests.
pub struct Plan {
    random: Random,
    profile: Profile,
    instrument: u32,
    sessions_per_member: u16,
    next_id: u64,
    /// Client ids of orders that may be open, by channel.
    open: Vec<Vec<u64>>,
}

impl Plan {
    /// A plan for the channels 0 to `members * sessions_per_member - 1`. The sessions of a member
    /// have adjacent channels.
    pub fn new(
        seed: u64,
        profile: Profile,
        instrument: u32,
        members: u16,
        sessions_per_member: u16,
    ) -> Self {
        let channels = usize::from(members * sessions_per_member);
        Self {
            random: Random::new(seed),
            profile,
            instrument,
            sessions_per_member,
            next_id: 1,
            open: (0..channels)
                .map(|_| Vec::with_capacity(OPEN_MAX))
                .collect(),
        }
    }

    pub fn channels(&self) -> u16 {
        self.open.len() as u16
    }

    /// The next request, on a channel with room; `None` if no channel has room.
    pub fn next(&mut self, has_room: impl Fn(u16) -> bool) -> Option<(u16, ClientMessage)> {
        let channels = self.channels();
        let first = self.random.below(u64::from(channels)) as u16;
        let mut all = (0..channels).map(|step| (first + step) % channels);
        let channel = all.find(|channel| has_room(*channel))?;
        Some((channel, self.request(channel)))
    }

    fn request(&mut self, channel: u16) -> ClientMessage {
        let dice = self.random.below(100);
        let open = self.open[usize::from(channel)].len();
        let Profile {
            new, cancel, amend, ..
        } = self.profile;
        if dice >= new + cancel + amend {
            return self.order(channel, TimeInForce::Ioc);
        }
        if open == 0 || (dice < new && open < OPEN_MAX) {
            return self.order(channel, TimeInForce::Gtc);
        }
        let at = self.random.below(open as u64) as usize;
        let open = &mut self.open[usize::from(channel)];
        if dice >= new + cancel {
            let client_order_id = open[at];
            return Amend {
                client_order_id,
                engine_order_id: 0,
                price_ticks: self.price(channel, TimeInForce::Gtc),
                quantity_lots: 0,
                new_client_order_id: 0,
            }
            .into();
        }
        Cancel {
            client_order_id: open.swap_remove(at),
            engine_order_id: 0,
        }
        .into()
    }

    fn order(&mut self, channel: u16, time_in_force: TimeInForce) -> ClientMessage {
        let id = self.next_id;
        self.next_id += 1;
        if time_in_force == TimeInForce::Gtc {
            self.open[usize::from(channel)].push(id);
        }
        let side = if self.buys(channel) {
            Side::Buy
        } else {
            Side::Sell
        };
        let price_ticks = self.price(channel, time_in_force);
        let lots = self.random.below(LOTS_MAX) + 1;
        NewOrder {
            time_in_force,
            ..NewOrder::limit(id, self.instrument, side, price_ticks, lots)
        }
        .into()
    }

    fn buys(&self, channel: u16) -> bool {
        (channel / self.sessions_per_member).is_multiple_of(2)
    }

    fn price(&mut self, channel: u16, time_in_force: TimeInForce) -> i64 {
        let away = match time_in_force {
            TimeInForce::Ioc => -(AWAY_TICKS as i64),
            _ => self.random.below(AWAY_TICKS) as i64 + 1,
        };
        if self.buys(channel) {
            MIDDLE_TICKS - away
        } else {
            MIDDLE_TICKS + away
        }
    }

    /// Removes an order that is no longer open. Linear in the session's open orders.
    pub fn ended(&mut self, channel: u16, client_order_id: u64) {
        let open = &mut self.open[usize::from(channel)];
        if let Some(at) = open.iter().position(|id| *id == client_order_id) {
            open.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(seed: u64) -> Vec<(u16, ClientMessage)> {
        let profile = Profile::default();
        let mut plan = Plan::new(seed, profile, 3, 4, 2);
        (0..20_000).filter_map(|_| plan.next(|_| true)).collect()
    }

    #[test]
    fn a_seed_determines_the_requests_and_the_profile_their_kinds() {
        let all = requests(7);
        assert!(all == requests(7) && all != requests(8));
        let share = |is: fn(&ClientMessage) -> bool| {
            all.iter().filter(|(_, message)| is(message)).count() * 100 / all.len()
        };
        let is_ioc = |m: &ClientMessage| matches!(m, ClientMessage::NewOrder(o) if o.time_in_force == TimeInForce::Ioc);
        assert!((5..10).contains(&share(is_ioc)));
        assert!((5..11).contains(&share(|m| matches!(m, ClientMessage::Amend(_)))));
        assert!(share(|m| matches!(m, ClientMessage::Cancel(_))) >= 30);
    }

    #[test]
    fn orders_fit_what_members_own_and_only_immediate_ones_cross() {
        for (channel, message) in requests(1) {
            let ClientMessage::NewOrder(order) = message else {
                continue;
            };
            let is_buy = channel / 2 % 2 == 0;
            assert_eq!(order.side == Side::Buy, is_buy);
            let kopecks = order.price_ticks * order.quantity_lots as i64;
            assert!(kopecks + kopecks / 1_000 < MONEY_PER_ORDER);
            assert!(order.quantity_lots <= UNITS_PER_ORDER);
            assert!(order.price_ticks > BAND.0 && order.price_ticks < BAND.1);
            let is_below = order.price_ticks < MIDDLE_TICKS;
            let rests = order.time_in_force == TimeInForce::Gtc;
            assert_eq!(is_below, is_buy == rests, "{order:?}");
        }
    }

    #[test]
    fn a_channel_without_room_is_skipped() {
        let mut plan = Plan::new(1, Profile::default(), 0, 2, 1);
        for _ in 0..100 {
            let (channel, _) = plan.next(|channel| channel == 1).expect("room");
            assert_eq!(channel, 1);
        }
        assert!(plan.next(|_| false).is_none());
    }

    #[test]
    fn a_profile_is_four_percentages_that_sum_to_100() {
        assert_eq!("47,38,8,7".parse(), Ok(Profile::default()));
        assert_eq!(Profile::default().to_string(), "47,38,8,7");
        for wrong in ["", "100", "50,50", "1,2,3,4", "40,40,10,10,0", "a,b,c,d"] {
            assert!(wrong.parse::<Profile>().is_err(), "{wrong}");
        }
    }
}
