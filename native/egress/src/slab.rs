//! Things by number, where a number that comes again is of another generation: what is told of a thing that has gone is told
//! of nothing.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    index: u32,
    generation: u32,
}

/// As many as fit beside an index and four bits of a kind.
const GENERATIONS: u32 = 1 << 28;

pub struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn insert_with(&mut self, make: impl FnOnce(Key) -> T) -> Key {
        let made: Result<Key, std::convert::Infallible> = self.try_insert_with(|key| Ok(make(key)));
        match made {
            Ok(key) => key,
            Err(never) => match never {},
        }
    }

    /// What is made knows its number.
    pub fn try_insert_with<E>(&mut self, make: impl FnOnce(Key) -> Result<T, E>) -> Result<Key, E> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        let key = Key {
            index,
            generation: slot.0,
        };
        match make(key) {
            Ok(value) => {
                slot.1 = Some(value);
                Ok(key)
            }
            Err(error) => {
                self.free.push(index);
                Err(error)
            }
        }
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        match self.slots.get_mut(key.index as usize) {
            Some((generation, value)) if *generation == key.generation => value.as_mut(),
            _ => None,
        }
    }

    pub fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, value) = self.slots.get_mut(key.index as usize)?;
        if *generation != key.generation {
            return None;
        }
        let value = value.take()?;
        *generation = (*generation + 1) % GENERATIONS;
        self.free.push(key.index);
        Some(value)
    }

    pub fn keys(&self) -> Vec<Key> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(|(_, (_, value))| value.is_some())
            .map(|(index, (generation, _))| Key {
                index: index as u32,
                generation: *generation,
            })
            .collect()
    }
}

/// What a poller gives back: a kind below 16, and which one of it.
pub fn token(kind: u64, key: Key) -> u64 {
    kind << 60 | u64::from(key.generation) << 32 | u64::from(key.index)
}

pub fn read_token(token: u64) -> (u64, Key) {
    let key = Key {
        index: token as u32,
        generation: (token >> 32) as u32 & (GENERATIONS - 1),
    };
    (token >> 60, key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_comes_again_is_another_one() {
        let mut slab = Slab::default();
        let first = slab.insert_with(|_| "a");
        let second = slab.insert_with(|_| "b");
        assert_eq!(slab.remove(first), Some("a"));
        let third = slab.insert_with(|_| "c");

        assert_eq!(slab.get_mut(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get_mut(third), Some(&mut "c"));
        assert_eq!(slab.len(), 2);
        assert_eq!(slab.keys(), [third, second]);
        assert_eq!(read_token(token(15, third)), (15, third));
    }
}
