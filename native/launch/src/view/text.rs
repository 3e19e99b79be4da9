//! The kernel's files that tell of a machine, rewritten to tell of a share of it. Pure.

/// /proc/meminfo of a machine with that much memory, all of it free. Names and units stay as this kernel has them.
pub fn meminfo(host: &str, memory_bytes: u64) -> String {
    let host_kib = host
        .lines()
        .find_map(|line| figure(line.strip_prefix("MemTotal:")?))
        .unwrap_or(u64::MAX);
    let share = (memory_bytes / 1024).min(host_kib);
    let line = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let unit = if rest.ends_with(" kB") { " kB" } else { "" };
        let value = match name {
            "MemTotal" | "MemFree" | "MemAvailable" | "CommitLimit" => share,
            // Facts about the kernel, not about what is in use.
            "VmallocTotal" | "Hugepagesize" => figure(rest)?,
            _ => 0,
        };
        Some(format!("{:<16}{value:>8}{unit}\n", format!("{name}:")))
    };
    host.lines().filter_map(line).collect()
}

fn figure(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// How many processors /proc/cpuinfo describes.
pub fn processors(host: &str) -> usize {
    blocks(host).count()
}

fn blocks(cpuinfo: &str) -> impl Iterator<Item = &str> {
    cpuinfo
        .split("\n\n")
        .filter(|block| block.starts_with("processor"))
}

/// /proc/cpuinfo with the first `cpus` processors of the host, as if there were no others.
pub fn cpuinfo(host: &str, cpus: usize) -> String {
    let mut text = String::new();
    for (number, block) in blocks(host).take(cpus).enumerate() {
        for line in block.lines() {
            let name = line.split('\t').next().unwrap_or_default().trim_end();
            let value = match name {
                "processor" => Some(number),
                "siblings" => Some(cpus),
                "cpu cores" => line
                    .rsplit(' ')
                    .next()
                    .and_then(|cores| cores.parse().ok())
                    .map(|cores: usize| cores.min(cpus)),
                _ => None,
            };
            match (value, line.split_once(": ")) {
                (Some(value), Some((head, _))) => text.push_str(&format!("{head}: {value}\n")),
                _ => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text.push('\n');
    }
    text
}

/// /proc/stat of `cpus` processors of which nothing is counted. The time of boot stays: programs reckon by it when processes
/// have started.
pub fn stat(host: &str, cpus: usize) -> String {
    let mut text = String::new();
    let mut line = |name: &str| text.push_str(&format!("{name} 0 0 0 0 0 0 0 0 0 0\n"));
    line("cpu ");
    (0..cpus).for_each(|number| line(&format!("cpu{number}")));
    let booted = host
        .lines()
        .find_map(|line| figure(line.strip_prefix("btime ")?))
        .unwrap_or(0);
    text.push_str(&format!(
        "intr 0\nctxt 0\nbtime {booted}\nprocesses 0\nprocs_running 1\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n"
    ));
    text
}

/// A list of processors as sysfs has them.
pub fn processor_list(cpus: usize) -> String {
    match cpus {
        1 => "0\n".into(),
        _ => format!("0-{}\n", cpus - 1),
    }
}

/// A load that says nothing: that of the machine is other sandboxes' business.
pub const LOAD: &str = "0.00 0.00 0.00 1/1 1\n";

#[cfg(test)]
mod tests {
    use super::*;

    const CPUINFO: &str = "processor\t: 0\nmodel name\t: X: fast\nsiblings\t: 4\ncore id\t\t: 0\ncpu cores\t: 2\nflags\t\t: a b\npower management:\n\nprocessor\t: 1\nmodel name\t: X: fast\nsiblings\t: 4\ncore id\t\t: 1\ncpu cores\t: 2\nflags\t\t: a b\npower management:\n\n";

    #[test]
    fn memory_is_the_limit_and_free() {
        let host = "MemTotal:       24684096 kB\nMemFree:        23094132 kB\nMemAvailable:   1 kB\nBuffers:            4096 kB\nHugePages_Total:       7\nHugepagesize:       2048 kB\nVmallocTotal:   34359738367 kB\n";

        let text = meminfo(host, 128 << 20);

        assert_eq!(
            text,
            "MemTotal:         131072 kB\nMemFree:          131072 kB\nMemAvailable:     131072 kB\nBuffers:               0 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\nVmallocTotal:   34359738367 kB\n"
        );
    }

    #[test]
    fn a_limit_above_the_machine_shows_the_machine() {
        let text = meminfo("MemTotal:  1000 kB\nMemFree: 5 kB\n", 1 << 40);
        assert_eq!(
            text,
            "MemTotal:           1000 kB\nMemFree:            1000 kB\n"
        );
    }

    #[test]
    fn as_many_processors_as_asked_for_are_described() {
        assert_eq!(processors(CPUINFO), 2);

        let one = cpuinfo(CPUINFO, 1);

        assert_eq!(
            one,
            "processor\t: 0\nmodel name\t: X: fast\nsiblings\t: 1\ncore id\t\t: 0\ncpu cores\t: 1\nflags\t\t: a b\npower management:\n\n"
        );
        assert_eq!(processors(&cpuinfo(CPUINFO, 2)), 2);
        assert_eq!(processors(&cpuinfo(CPUINFO, 9)), 2);
        assert_eq!(cpuinfo("nothing that we know", 1), "");
    }

    #[test]
    fn counters_have_a_line_for_each_processor_and_the_time_of_boot() {
        let text = stat("cpu  1 2 3\ncpu0 1 2 3\nbtime 1795990552\n", 2);

        let names: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(
            names,
            [
                "cpu",
                "cpu0",
                "cpu1",
                "intr",
                "ctxt",
                "btime",
                "processes",
                "procs_running",
                "procs_blocked",
                "softirq"
            ]
        );
        assert!(text.contains("\nbtime 1795990552\n"));
        assert!(text.starts_with("cpu  0 "));
    }

    #[test]
    fn lists_name_the_processors() {
        assert_eq!(processor_list(1), "0\n");
        assert_eq!(processor_list(4), "0-3\n");
    }
}
