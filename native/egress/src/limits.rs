//! All bounds, each with its reason.

use std::time::Duration;

// ---- the desk ------------------------------------------------------------------------------------

/// Nodes connect one at a time; more than a few are strays.
pub const DESK_CONNECTIONS_MAX: usize = 16;
/// Replies and refusals that a node has not read yet; beyond, refusals are lost, and it is dropped for replies.
pub const UNSENT_MAX: usize = 4096;
/// A page of counts of this length fits a message.
pub const COUNTS_PAGE: usize = 256;
/// More sandboxes than a node has.
pub const SANDBOXES_MAX: usize = 16_384;
/// Ended ones that nobody has detached, kept for their counts; beyond, the first are forgotten.
pub const ENDED_MAX: usize = 4096;
/// Attaching one after the other; a node that is started attaches all that it has.
pub const ATTACHING_MAX: usize = 16_384;
/// The longest name of a sandbox: ids are shorter.
pub const SANDBOX_NAME_MAX: usize = 128;

// ---- rules and settings --------------------------------------------------------------------------

/// With the longest names they fit a message.
pub const RULES_MAX: usize = 256;
pub const PORT_RANGES_MAX: usize = 16;
pub const RESOLVERS_MAX: usize = 4;
pub const PRIVATE_MAX: usize = 64;

// ---- connections ---------------------------------------------------------------------------------

/// Of one sandbox at once, unless its node says otherwise: browsers and package managers use some hundred.
pub const CONNECTIONS: usize = 1024;
/// Descriptors of a connection: two sockets, and a pipe each way while something waits in it.
pub const FLOW_DESCRIPTORS: u64 = 6;
/// Of a sandbox: four sockets, two for packets, link, process, two pollers and the place of each in another, one in reserve.
pub const SANDBOX_DESCRIPTORS: u64 = 13;
/// For everything else: the desk, pipes in reserve, what is open for a moment.
pub const OTHER_DESCRIPTORS: u64 = 512;
/// All together; what they hold in the kernel is bounded by it.
pub const FLOWS_MAX: usize = 32_768;
/// Who has no more than these may open another one until nothing at all is left; others until three quarters are in use. So
/// a few that take all they can get do not keep the rest out.
pub const FLOWS_SURE: usize = 32;
/// As many may wait to be accepted; more wait with their sandbox.
pub const BACKLOG: i32 = 512;
/// Accepted in one turn of a sandbox.
pub const ACCEPTS_A_TURN: usize = 32;
/// Connections begun a second, and how many may come at once: what is refused costs us as much as what is not.
pub const CONNECTS_A_SECOND: f64 = 1000.0;
pub const CONNECTS_AT_ONCE: f64 = 2000.0;
/// Bytes moved for a sandbox in its turn, and for one of its connections: then the others' is.
pub const TURN_BYTES: usize = 1 << 20;
pub const FLOW_TURN_BYTES: usize = 256 << 10;
/// One move into a pipe: what a pipe holds.
pub const PIPE_BYTES: usize = 64 << 10;
/// Empty pipes kept for the next.
pub const SPARE_PIPES: usize = 32;
/// Bytes that a socket takes before they can be sent: enough to keep a fast link busy between two turns.
pub const UNSENT_BYTES: i32 = 256 << 10;
/// Connections of a sandbox for which the kernel may hold what it finds right, some MiB, when one side stops reading. What all
/// TCP of the machine holds has a bound: beyond it nobody's connections work.
pub const FLOWS_WIDE: usize = 16;
/// Half of what it holds for each of the others, at each end and each way: enough for some MB a second from afar.
pub const NARROW_BYTES: i32 = 64 << 10;
/// What TCP of the machine may hold before it holds everybody short, divided by this: what all sandboxes together may make it
/// hold here. As much is left to their own ends, and twice as much to the host.
pub const HELD_PART: u64 = 4;
/// And of that, divided by this, one of them: those that do not read leave the rest something.
pub const HELD_SANDBOX_PART: u64 = 2;
/// From such a part on, of all or of one's own, connections are held narrow; slow readers lose nothing by it but speed.
pub const HELD_WIDE_PART: u64 = 2;
/// Who holds less than such a part gets new connections also when all is held: others do not keep it out.
pub const HELD_SURE_PART: u64 = 64;
/// While TCP of the whole machine holds less than such a part there is nothing to look for: each look asks for every socket.
pub const HELD_LOOK_PART: u64 = 4;
/// First bytes of a connection that are looked at: a client hello with post-quantum keys has some 2 KiB, cookies 8.
pub const PEEK_BYTES: usize = 16 << 10;
/// How often they are looked at as they come; then only with each tick. They come in some ten pieces at most, and each look
/// costs as much as moving many times their length.
pub const LOOKS_AT_ONCE: u32 = 16;
/// Names remembered of one connection.
pub const FLOW_NAMES_MAX: usize = 16;

// ---- names ---------------------------------------------------------------------------------------

/// A question after a name is far shorter; longer ones are none.
pub const QUESTION_BYTES_MAX: usize = 1024;
/// What resolvers may send by UDP without being cut on their way (DNS flag day 2020).
pub const UDP_ANSWER_BYTES: usize = 1232;
/// By TCP: the answer of a name with hundreds of addresses.
pub const TCP_ANSWER_BYTES_MAX: usize = 16 << 10;
/// Names have fewer; those that carry data have many.
pub const LABELS_MAX: usize = 32;
/// Records of an answer that are looked at.
pub const RECORDS_MAX: usize = 256;
/// CNAMEs that are followed.
pub const CHAIN_MAX: usize = 16;
/// Addresses of one name that are given on: the answer fits 512 bytes with most names, and more serve nobody.
pub const ADDRESSES_MAX: usize = 16;
/// A day: nobody needs an answer for longer.
pub const TTL_MAX: u32 = 86_400;
/// Questions of a sandbox under way at once.
pub const QUESTIONS_MAX: usize = 64;
/// And of all.
pub const ALL_QUESTIONS_MAX: usize = 4096;
/// Questions a second, and how many may come at once.
pub const QUESTIONS_A_SECOND: f64 = 100.0;
pub const QUESTIONS_AT_ONCE: f64 = 400.0;
/// A connection for questions that says nothing.
pub const TALK_IDLE: Duration = Duration::from_secs(10);
/// Datagrams read in one turn of a sandbox.
pub const DATAGRAMS_A_TURN: usize = 64;
/// Until a resolver is asked again, or the next one.
pub const RESOLVER_WAIT: Duration = Duration::from_millis(2000);
/// Attempts for one question; clients give up after 5 to 10 s.
pub const ATTEMPTS: u32 = 3;
/// Bindings of a sandbox, name and address; beyond, the oldest go.
pub const BINDINGS_MAX: usize = 4096;
/// Names bound to one address.
pub const NAMES_OF_ADDRESS_MAX: usize = 64;
/// Of the host's resolv.conf.
pub const RESOLV_CONF_BYTES_MAX: u64 = 64 << 10;
/// The host's resolv.conf is read again after this time.
pub const RESOLV_CONF_AGE: Duration = Duration::from_secs(5);

// ---- refusals ------------------------------------------------------------------------------------

/// How often refusals are told.
pub const DENIED_EVERY: Duration = Duration::from_secs(1);
/// Different ones of a sandbox told each time; others are told as a number.
pub const DENIED_KINDS: usize = 32;

/// How often limits of time are looked at.
pub const TICK: Duration = Duration::from_millis(250);
