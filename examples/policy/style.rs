//! Styles to write a solution in.

use serde::{Deserialize, Serialize};

use super::strategy::Working;

/// A style of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Style {
    /// Short sentences that say what is done.
    Clear,
    /// As few words as possible.
    Terse,
    /// One long sentence with irrelevant remarks.
    Rambling,
    /// Bureaucratic.
    Stiff,
}

/// All styles.
pub(crate) const STYLES: [Style; 4] = [Style::Clear, Style::Terse, Style::Rambling, Style::Stiff];

impl Style {
    /// Returns `true` if the style is easy to read.
    pub(crate) const fn is_plain(self) -> bool {
        matches!(self, Self::Clear | Self::Terse)
    }
}

/// Returns the text of a solution. In every style, equations stand by themselves and the answer is labelled.
pub(super) fn write(style: Style, working: &Working) -> String {
    match style {
        Style::Clear => clear(working),
        Style::Terse => terse(working),
        Style::Rambling => rambling(working),
        Style::Stiff => stiff(working),
    }
}

fn clear(Working { steps, answer }: &Working) -> String {
    let mut text = match steps.len() {
        0 => "The numbers are close to round ones, so a quick look will do.\n".to_owned(),
        1 => "One step leads to the goal.\n".to_owned(),
        _ => "We can do this in two small steps.\n".to_owned(),
    };
    for (opening, step) in ["First", "Then"].iter().zip(steps) {
        text.push_str(&format!("{opening} we {}: {}.\n", step.purpose, step.equation));
    }
    text.push_str(&format!("That is all we need to know.\nAnswer: {answer}"));
    text
}

fn terse(Working { steps, answer }: &Working) -> String {
    let equations: String = steps.iter().map(|step| format!("{};\n", step.equation)).collect();
    format!("{equations}Answer: {answer}")
}

fn rambling(Working { steps, answer }: &Working) -> String {
    let mut text = "Well, basically, what I really think we should just do here, and it is actually very very simple, is to \
                    simply look at it again and again and then again, because, you know, when you really look at it, actually \
                    really just look at it, it is basically really quite obvious that it is really just a matter of actually \
                    really looking at it, and looking at it again, really, and so"
        .to_owned();
    for step in steps {
        text.push_str(&format!(
            " I would then just go on and basically {}, which really is what anybody would actually do: {}, and so",
            step.purpose, step.equation
        ));
    }
    text.push_str(&format!(
        " looking at all of that again I would basically really just say that this is it, I think.\nAnswer: {answer}"
    ));
    text
}

fn stiff(Working { steps, answer }: &Working) -> String {
    let mut text = "Basically, an examination of the numerical information provided was actually undertaken, and the determination of the \
                    applicable computational methodology was subsequently considered to be really quite necessitated, whereupon the \
                    determination of the organizational preconditions of the determination was authorized and the documentation \
                    of the determination was initiated in accordance with the applicable computational methodology"
        .to_owned();
    for step in steps {
        text.push_str(&format!(
            ", and subsequently the computational operation necessitated by the applicable methodology (in order to {}) was \
             executed and the following numerical information was obtained: {}",
            step.purpose, step.equation
        ));
    }
    text.push_str(&format!(
        ", whereby the final numerical determination was consequently considered to be established.\nAnswer: {answer}"
    ));
    text
}
