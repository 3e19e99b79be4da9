//! How often something may happen.

use std::time::Instant;

pub struct Bucket {
    tokens: f64,
    most: f64,
    a_second: f64,
    filled: Instant,
}

impl Bucket {
    pub fn new(a_second: f64, most: f64, now: Instant) -> Bucket {
        Bucket {
            tokens: most,
            most,
            a_second,
            filled: now,
        }
    }

    /// False when it has happened as often as it may for now.
    pub fn take(&mut self, now: Instant) -> bool {
        let seconds = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + seconds * self.a_second).min(self.most);
        self.filled = now;
        let has = self.tokens >= 1.0;
        if has {
            self.tokens -= 1.0;
        }
        has
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_gives_what_it_holds_and_then_what_comes_in() {
        let now = Instant::now();
        let mut bucket = Bucket::new(10.0, 3.0, now);
        let taken = |bucket: &mut Bucket, at| (0..100).filter(|_| bucket.take(at)).count();

        assert_eq!(taken(&mut bucket, now), 3);
        assert_eq!(taken(&mut bucket, now + Duration::from_millis(210)), 2);
        assert_eq!(taken(&mut bucket, now + Duration::from_secs(1000)), 3);
    }
}
