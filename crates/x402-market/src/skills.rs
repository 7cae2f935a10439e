//! Skills as numbers, so that a set of them is one machine word.

use std::collections::BTreeMap;

/// The number of a skill, from 0 to 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Skill(u8);

impl Skill {
    /// The number of skills that can be told apart.
    pub const LIMIT: usize = 64;

    /// Returns the skill with this number, if it is below [`Skill::LIMIT`].
    pub const fn new(number: usize) -> Option<Self> {
        if number < Self::LIMIT { Some(Self(number as u8)) } else { None }
    }
}

/// A set of skills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SkillSet(u64);

impl SkillSet {
    /// Returns `true` if the set has this skill.
    pub const fn contains(self, skill: Skill) -> bool {
        self.0 >> skill.0 & 1 == 1
    }
}

impl FromIterator<Skill> for SkillSet {
    fn from_iter<I: IntoIterator<Item = Skill>>(skills: I) -> Self {
        Self(skills.into_iter().fold(0, |set, skill| set | 1 << skill.0))
    }
}

/// The names of the skills that a student has work for.
///
/// Other skills on cards are ignored, so that evaluators cannot fill the table.
///
/// ```
/// use x402_market::selection::Skills;
///
/// let skills: Skills = ["arithmetic", "prose"].into_iter().collect();
/// let claimed = skills.set(["prose", "clairvoyance"]);
/// assert!(claimed.contains(skills.get("prose").unwrap()));
/// assert!(!claimed.contains(skills.get("arithmetic").unwrap()));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Skills(BTreeMap<String, Skill>);

impl Skills {
    /// Returns the skill of this name, which gets a number if it has none. Returns `None` if there are [`Skill::LIMIT`] others.
    pub fn insert(&mut self, name: &str) -> Option<Skill> {
        if let Some(skill) = self.get(name) {
            return Some(skill);
        }
        let skill = Skill::new(self.0.len())?;
        self.0.insert(name.to_owned(), skill);
        Some(skill)
    }

    /// Returns the skill of this name.
    pub fn get(&self, name: &str) -> Option<Skill> {
        self.0.get(name).copied()
    }

    /// Returns those of the names that have a number.
    pub fn set<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> SkillSet {
        names.into_iter().filter_map(|name| self.get(name)).collect()
    }
}

impl<'a> FromIterator<&'a str> for Skills {
    /// Names beyond the limit are left out.
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Self {
        let mut skills = Self::default();
        for name in names {
            skills.insert(name);
        }
        skills
    }
}
