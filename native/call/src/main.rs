//! `dsec-call`: runs in a container of the call service, one call at a time (docs/internals/calls.md).
//!
//! Root of the sandbox, started by the node as an exec of its agent; orders come on standard input. Each call gets users of its
//! own, which nothing else ever is, so that what it left is known by its owner.

mod baseline;
mod interpreter;
mod leftovers;
mod output;
mod places;
mod program;
mod wire;

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

use interpreter::Interpreter;
use places::Places;
use wire::{Answer, Order, Ready, Why};

const VERSION: u32 = 3;
const BUFFER_BYTES: usize = 64 << 10;

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dsec-call: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    dsec_sys::memory::keep_heap_small();
    dsec_sys::process::set_umask(0o022);
    dsec_sys::process::become_subreaper()?;
    let mut places = Places::open()?;
    let mut interpreter = None;
    let orders = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut orders = BufReader::with_capacity(BUFFER_BYTES, orders);
    let answers = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut answers = BufWriter::with_capacity(BUFFER_BYTES, answers);
    let ready = || Answer {
        ready: Some(Ready { version: VERSION }),
        ..Answer::default()
    };
    wire::send(&mut answers, &ready())?;
    answers.flush()?;
    while let Some(order) = wire::receive::<Order>(&mut orders)? {
        let answer = match order {
            Order {
                warm: Some(warm), ..
            } => Interpreter::start(&warm).map(|started| {
                interpreter = Some(started);
                places.settle();
                ready()
            }),
            Order {
                place: Some(place), ..
            } => places.make(&place).map(|placed| Answer {
                placed: Some(placed),
                ..Answer::default()
            }),
            Order { run: Some(run), .. } => {
                let ran = program::run(&places, interpreter.as_mut(), &run);
                ran.inspect_err(|error| places.spoil(error))
                    .inspect(|ran| {
                        if ran.why == Why::Lost {
                            places.spoil(&io::Error::other("the interpreter is lost"));
                        }
                    })
                    .map(|ran| Answer {
                        ran: Some(ran),
                        ..Answer::default()
                    })
            }
            Order {
                finish: Some(finish),
                ..
            } => Ok(Answer {
                finished: Some(places.finish(&finish)),
                ..Answer::default()
            }),
            Order { check: true, .. } => interpreter
                .as_mut()
                .map_or(Ok(()), Interpreter::check)
                .and_then(|()| places.check())
                .map(|()| ready()),
            _ => Err(io::Error::other("an order that says nothing")),
        };
        let answer = answer.unwrap_or_else(|error| Answer {
            refused: Some(error.to_string()),
            ..Answer::default()
        });
        wire::send(&mut answers, &answer)?;
        // What came of the code is told before it is cleaned up; what was made for it, with that.
        if answer.ran.is_some() || orders.buffer().is_empty() {
            answers.flush()?;
        }
    }
    Ok(())
}
