//! What all connections may hold in the kernel. TCP has one pool on a machine: beyond a mark it holds all connections short,
//! whoever's they are, and beyond another one they break.

use std::collections::BinaryHeap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Doing, Error, Result};
use crate::limits::{HELD_LOOK_PART, HELD_PART, HELD_SANDBOX_PART, HELD_SURE_PART, HELD_WIDE_PART};

const POOL: &str = "/proc/sys/net/ipv4/tcp_mem";
const USE: &str = "/proc/net/sockstat";
const ALL: &str = "/proc/meminfo";
/// Of all memory: the kernel's own choice of the mark.
const POOL_PART: u64 = 16;
/// Of which the pool is counted.
const PAGE: u64 = 4096;

pub struct Memory {
    /// What the kernel says of the pool; it is open, as nothing can be opened later.
    used: File,
    /// For all sandboxes together.
    most: u64,
    /// Somebody had less than all room when it was looked at last.
    is_short: bool,
}

/// For the connections of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A few may hold what the kernel finds right.
    Wide,
    /// None holds more than it must.
    Narrow,
    /// So, and there are no new ones.
    None,
}

/// What is to be done, by the number of a sandbox.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    pub rooms: Vec<Room>,
    /// With the number of a connection of it.
    pub cut: Vec<(usize, usize)>,
}

impl Memory {
    /// `most`: unless a part of the machine's pool.
    pub fn open(most: Option<u64>) -> Result<Memory> {
        let most = match most {
            Some(most) => most,
            None => mark()? / HELD_PART,
        };
        Ok(Memory {
            used: File::open(USE).doing(format!("opening {USE}"))?,
            most,
            is_short: false,
        })
    }

    /// Whether it is worth looking at each connection. What cannot be read is worth it.
    pub fn wants_look(&self) -> bool {
        let mut buffer = [0; 1024];
        let read = self.used.read_at(&mut buffer, 0).ok();
        let used = read.and_then(|count| used_in(&String::from_utf8_lossy(&buffer[..count])));
        self.is_short || used.map_or(true, |pages| pages * PAGE >= self.most / HELD_LOOK_PART)
    }

    /// `held`: of each connection of each sandbox. Who holds most gives up most: its largest first.
    pub fn plan(&mut self, held: &[Vec<u64>]) -> Plan {
        let mut by_sum: BinaryHeap<(u64, usize)> = held
            .iter()
            .enumerate()
            .map(|(number, each)| (each.iter().sum(), number))
            .collect();
        let mut total: u64 = by_sum.iter().map(|(sum, _)| sum).sum();
        let mut rooms = vec![Room::Wide; held.len()];
        for &(sum, number) in &by_sum {
            rooms[number] = self.room(sum, total);
        }
        self.is_short = rooms.iter().any(|room| *room != Room::Wide);
        let mut order: Vec<Vec<usize>> = held.iter().map(|each| by_size(each)).collect();
        let mut cut = Vec::new();
        while let Some((sum, number)) = by_sum.pop() {
            if total <= self.most && sum <= self.most / HELD_SANDBOX_PART {
                break;
            }
            if let Some(flow) = order[number].pop() {
                cut.push((number, flow));
                total -= held[number][flow];
                by_sum.push((sum - held[number][flow], number));
            }
        }
        Plan { rooms, cut }
    }

    /// Who holds little gets new connections also when all that there is is held.
    fn room(&self, sum: u64, total: u64) -> Room {
        let own = self.most / HELD_SANDBOX_PART;
        if sum >= own || total >= self.most && sum >= self.most / HELD_SURE_PART {
            Room::None
        } else if sum >= own / HELD_WIDE_PART || total >= self.most / HELD_WIDE_PART {
            Room::Narrow
        } else {
            Room::Wide
        }
    }
}

/// The largest last.
fn by_size(each: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..each.len()).collect();
    order.sort_by_key(|flow| each[*flow]);
    order
}

/// From how many bytes on the kernel holds all connections short. It does not say so in every network: then it is what it
/// chooses by itself.
fn mark() -> Result<u64> {
    let pages = std::fs::read_to_string(POOL).ok();
    if let Some(pages) = pages.and_then(|text| pressure_in(&text)) {
        return Ok(pages.saturating_mul(PAGE));
    }
    let text = std::fs::read_to_string(ALL).doing(format!("reading {ALL}"))?;
    let all = all_in(&text).ok_or_else(|| Error::NotFound(format!("{ALL} says no total")))?;
    Ok(all / POOL_PART)
}

/// The first line, in KiB.
fn all_in(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let count: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    count.checked_mul(1024)
}

/// The second of three numbers of pages.
fn pressure_in(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn used_in(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("TCP: "))?;
    let mut words = line.split_ascii_whitespace();
    words.find(|word| *word == "mem")?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(most: u64) -> Memory {
        Memory::open(Some(most)).unwrap()
    }

    #[test]
    fn the_kernel_says_how_much_there_is_and_how_much_is_in_use() {
        assert_eq!(pressure_in("287901\t383869\t575802\n"), Some(383_869));
        let text =
            "sockets: used 119\nTCP: inuse 1 orphan 0 tw 3 alloc 3 mem 17\nUDP: inuse 0 mem 84\n";
        assert_eq!(used_in(text), Some(17));
        assert_eq!(used_in("UDP: inuse 0 mem 84\n"), None);
        assert!(Memory::open(None).unwrap().most > 0);
        assert!(memory(0).wants_look());
        assert!(!memory(u64::MAX).wants_look());
    }

    #[test]
    fn nothing_is_done_while_little_is_held() {
        let mut memory = memory(1000);
        let plan = memory.plan(&[vec![10, 20], vec![], vec![100]]);
        assert_eq!((plan.rooms, plan.cut), (vec![Room::Wide; 3], vec![]));
        assert!(!memory.is_short);
    }

    #[test]
    fn one_that_holds_much_is_narrowed_and_then_cut_to_its_part() {
        let mut memory = memory(1000);
        let plan = memory.plan(&[vec![10], vec![200, 100]]);
        assert_eq!(
            (plan.rooms, plan.cut),
            (vec![Room::Wide, Room::Narrow], vec![])
        );
        let plan = memory.plan(&[vec![10], vec![100, 300, 150]]);
        assert_eq!(plan.rooms, [Room::Narrow, Room::None]);
        assert_eq!(plan.cut, [(1, 1)]);
        assert!(memory.is_short && memory.wants_look());
        memory.plan(&[vec![10], vec![]]);
        assert!(!memory.is_short);
    }

    #[test]
    fn of_all_who_holds_most_gives_up_most_and_who_holds_little_goes_on() {
        let held = [vec![300, 190], vec![250, 200], vec![1, 2], vec![400]];
        let plan = memory(1000).plan(&held);
        assert_eq!(
            plan.rooms,
            [Room::None, Room::None, Room::Narrow, Room::None]
        );
        assert_eq!(plan.cut, [(0, 0), (1, 0)]);
        let plan = memory(0).plan(&held);
        assert_eq!(plan.cut.len(), 7);
    }
}
