//! Room `latency`: HDR histograms of latencies as percentile files and plots, for the load
//! generator and the benchmarks.
//!
//! | file | what |
//! |---|---|
//! | `hgrm` | percentile distribution in the text format of HdrHistogram's tools |
//! | `plot` | percentile curves as SVG |

pub mod hgrm;
pub mod plot;
